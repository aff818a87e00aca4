"""What trainers publish about their learning, once for each global step, for monitors to add up."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import msgspec

from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.dht import DhtNode

logger = logging.getLogger(__name__)

TTL_S = 600.0


class MetricsRecord(msgspec.Struct, frozen=True):
    """One peer's share in one global step.

    Attributes:
        step: the global step that was reached.
        samples_per_second: own speed.
        samples_accumulated: own samples in that step.
        loss: sum of the losses of the micro-batches.
        mini_steps: number of micro-batches.
    """

    step: int
    samples_per_second: float
    samples_accumulated: int
    loss: float
    mini_steps: int

    def __post_init__(self) -> None:
        numbers = (self.step, self.samples_per_second, self.samples_accumulated, self.mini_steps)
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or not math.isfinite(self.loss):
            raise ValueError("counts and speeds are finite and >= 0, a loss is finite")


def metrics_key(run_id: str) -> str:
    """The DHT key of a run's metrics."""
    return f"{run_id}.metrics"


async def publish_metrics(
    dht: DhtNode, own_id: PeerId, run_id: str, record: MetricsRecord, ttl_s: float = TTL_S
) -> None:
    """Publish this peer's metrics; what goes wrong is logged, since nothing depends on them."""
    try:
        await dht.store(metrics_key(run_id), msgspec.to_builtins(record), ttl_s, subkey=own_id)
    except ManyhandsError as error:
        logger.warning("the metrics of step %d were not published: %s", record.step, error)


async def read_metrics(dht: DhtNode, run_id: str) -> Mapping[PeerId, MetricsRecord]:
    """The last metrics of each peer; what cannot be read is skipped.

    Raises:
        Unavailable: the DHT does not answer.
    """
    records = {}
    for subkey, stored in (await dht.get(metrics_key(run_id))).items():
        if stored.owner != subkey:
            continue
        try:
            records[PeerId(subkey)] = msgspec.convert(stored.value, MetricsRecord)
        except msgspec.ValidationError as error:
            logger.warning("the metrics of peer %s cannot be read: %s", subkey, error)
    return records
