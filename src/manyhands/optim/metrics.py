"""Metrics that peers publish for monitors: trainers once for each global step, evaluators now and then."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from manyhands.averaging.messages import Count
from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.dht import DhtNode

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=msgspec.Struct)

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

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
        numbers = (self.step, self.samples_per_second, self.samples_accumulated, self.mini_steps - 1)
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or not math.isfinite(self.loss):
            raise ValueError("counts and speeds are finite and >= 0, a loss is finite")


class HeldoutRecord(msgspec.Struct, frozen=True):
    """An evaluator's metrics of the model at one global step, on held-out text.

    Attributes:
        loss: mean over the samples, masked language modelling and sentence order together.
        mlm_accuracy: share of the masked tokens that the model guesses.
        sop_accuracy: share of the samples whose sentence order it tells.
    """

    step: Count
    loss: float
    mlm_accuracy: Share
    sop_accuracy: Share
    num_samples: Count

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.loss, self.mlm_accuracy, self.sop_accuracy))):
            raise ValueError("losses and accuracies are finite")


def metrics_key(run_id: str) -> str:
    """The DHT key of a run's metrics."""
    return f"{run_id}.metrics"


def heldout_key(run_id: str) -> str:
    """The DHT key of the held-out metrics of a run."""
    return f"{run_id}.heldout"


async def publish_metrics(
    dht: DhtNode, own_id: PeerId, run_id: str, record: MetricsRecord, ttl_s: float = TTL_S
) -> None:
    """Publish this peer's metrics; errors are only logged, since nothing depends on them."""
    await _publish(dht, own_id, metrics_key(run_id), record, f"the metrics of step {record.step}", ttl_s)


async def publish_heldout(dht: DhtNode, own_id: PeerId, run_id: str, record: HeldoutRecord) -> None:
    """Publish held-out metrics; errors are only logged, since nothing depends on them."""
    await _publish(dht, own_id, heldout_key(run_id), record, f"the held-out loss of step {record.step}")


async def read_metrics(dht: DhtNode, run_id: str) -> Mapping[PeerId, MetricsRecord]:
    """The last metrics of each peer; unreadable ones are skipped.

    Raises:
        Unavailable: the DHT does not answer.
    """
    return await _read(dht, metrics_key(run_id), MetricsRecord, "metrics")


async def read_heldout(dht: DhtNode, run_id: str) -> Mapping[PeerId, HeldoutRecord]:
    """The last metrics of each evaluator; unreadable ones are skipped.

    Raises:
        Unavailable: the DHT does not answer.
    """
    return await _read(dht, heldout_key(run_id), HeldoutRecord, "held-out losses")


async def _publish(
    dht: DhtNode, own_id: PeerId, key: str, record: msgspec.Struct, what: str, ttl_s: float = TTL_S
) -> None:
    try:
        await dht.store(key, msgspec.to_builtins(record), ttl_s, subkey=own_id)
    except ManyhandsError as error:
        logger.warning("%s cannot be published: %s", what, error)


async def _read(dht: DhtNode, key: str, kind: type[R], what: str) -> dict[PeerId, R]:
    records = {}
    for subkey, stored in (await dht.get(key)).items():
        if stored.owner != subkey:
            continue
        try:
            records[PeerId(subkey)] = msgspec.convert(stored.value, kind)
        except msgspec.ValidationError as error:
            logger.warning("the %s of peer %s cannot be read: %s", what, subkey, error)
    return records
