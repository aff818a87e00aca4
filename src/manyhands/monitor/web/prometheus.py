"""The run in the text format of Prometheus."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from manyhands.monitor.picture import PeerState, Point, RunPicture

STATES: tuple[PeerState, ...] = ("training", "averaging", "gone", "left")


class _RunCollector(Collector):
    def __init__(self, picture: RunPicture, num_aborted: int, num_pages: int) -> None:
        self._picture = picture
        self._num_aborted = num_aborted
        self._num_pages = num_pages

    def collect(self) -> Iterator[Metric]:
        picture = self._picture
        last = picture.last or Point(time=math.nan, step=0)
        gauges: list[tuple[str, str, float | None]] = [
            ("step", "Committed global steps.", picture.step),
            ("accumulated_samples", "Samples for the next global step, of all peers.", picture.samples),
            ("target_batch_size", "Samples that a global step needs.", picture.target_batch_size),
            ("training_peers", "Peers that train now.", picture.num_peers),
            ("samples_per_second", "Speed of all peers together.", picture.samples_per_second),
            ("eta_seconds", "Seconds until the next global step.", picture.eta_s),
            ("looked_timestamp_seconds", "When the monitor last looked at the run.", picture.time),
            ("loss", "Loss of the last global step, over all peers.", last.loss),
            ("heldout_loss", "Held-out loss of the last global step.", last.heldout_loss),
            ("learning_rate", "Learning rate of the last global step.", last.learning_rate),
            ("step_sent_bytes", "Bytes sent by all peers for the last global step.", last.bytes_sent),
            ("step_timestamp_seconds", "When the last global step was made.", last.time),
        ]
        for name, text, value in gauges:
            if value is not None and not math.isnan(value):
                yield self._gauge(name, text, value)
        text = "Samples in all committed global steps, or what the unit says."
        committed = CounterMetricFamily("manyhands_committed_samples", text, labels=["run_id", "unit"])
        committed.add_metric([picture.run_id, picture.unit], picture.committed_samples)
        yield committed
        text = "Events of aborted rounds since the start of the monitor; one round may have several."
        aborted = CounterMetricFamily("manyhands_rounds_aborted", text, labels=["run_id"])
        aborted.add_metric([picture.run_id], self._num_aborted)
        yield aborted
        states = Counter(row.state for row in picture.peers)
        peers = GaugeMetricFamily("manyhands_peers", "Peers by state.", labels=["run_id", "state"])
        for state in STATES:
            peers.add_metric([picture.run_id, state], states[state])
        yield peers
        yield self._gauge("open_pages", "Browsers that have the page open.", self._num_pages)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(f"manyhands_{name}", text, labels=["run_id"])
        gauge.add_metric([self._picture.run_id], value)
        return gauge


def as_metrics(picture: RunPicture, *, num_aborted: int, num_pages: int) -> bytes:
    """All metrics of a run; peers are counted, not listed, as their number has no bound."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RunCollector(picture, num_aborted, num_pages))
    return generate_latest(registry)
