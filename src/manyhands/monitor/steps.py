"""Decides when the metrics of a global step are complete and can be added up. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from manyhands.base.identity import PeerId
from manyhands.monitor.monitor_events import StepMade
from manyhands.optim.metrics import MetricsRecord

SETTLED_S = 1.0
"""Seconds without new metrics after which those of a step are complete: the other peers had no batch in it."""
LONGEST_SILENCE_S = 30.0
"""Seconds without a report after which a step is reported although the next one came before it was complete."""


class CompleteSteps:
    """Reports each global step at most once: as soon as all trainers have published their metrics of it.

    A peer has one record, which it overwrites at its next step. If steps are faster than the reads, some are skipped:
    their sums would lack peers.
    """

    def __init__(self) -> None:
        self._step = -1  # newest step seen
        self._is_told = True
        self._records: dict[PeerId, MetricsRecord] = {}  # of that step
        self._grown_at = -math.inf
        self._told_at = -math.inf

    @property
    def newest_step(self) -> int:
        """The newest global step seen; -1 before the first one."""
        return self._step

    @property
    def is_waiting(self) -> bool:
        """Whether metrics of the newest step are still missing."""
        return not self._is_told

    def look(self, metrics: Mapping[PeerId, MetricsRecord], trainers: Collection[PeerId], now: float) -> list[StepMade]:
        """The steps that can be reported now.

        Args:
            metrics: the last ones of each peer.
            trainers: the current trainers.
            now: seconds of a monotonic clock.
        """
        told = []
        step = max((record.step for record in metrics.values()), default=-1)
        if step > self._step:
            if not self._is_told and now - self._told_at >= LONGEST_SILENCE_S:
                told.append(self._tell(now))
            self._step = step
            self._is_told = False
            self._records = {}
        if self._is_told:
            return told
        records = {peer_id: record for peer_id, record in metrics.items() if record.step == self._step}
        if not records.keys() <= self._records.keys():
            self._grown_at = now
        self._records |= records
        is_complete = self._records.keys() >= set(trainers)
        if is_complete or now - self._grown_at >= SETTLED_S:
            told.append(self._tell(now))
        return told

    def _tell(self, now: float) -> StepMade:
        self._is_told = True
        self._told_at = now
        return sum_up(self._step, self._records.values())


def sum_up(step: int, records: Collection[MetricsRecord]) -> StepMade:
    """Add up the published metrics of a step; the loss is the mean over the micro-batches."""
    mini_steps = sum(record.mini_steps for record in records)
    return StepMade(
        step=step,
        loss=sum(record.loss for record in records) / mini_steps,
        alive_peers=len(records),
        samples=sum(record.samples_accumulated for record in records),
        samples_per_second=sum(record.samples_per_second for record in records),
    )
