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
from manyhands.optim.account import AccountRecord

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=msgspec.Struct)

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

TTL_S = 600.0


class MetricsRecord(msgspec.Struct, frozen=True):
    """One peer's share in one global step.

    Attributes:
        step: the global step that was reached.
        samples_accumulated: own samples in that step.
        loss: sum of the losses of the micro-batches.
        mini_steps: number of micro-batches.
    """

    step: Count
    samples_per_second: float
    samples_accumulated: Count
    loss: float
    mini_steps: Annotated[int, msgspec.Meta(ge=1, le=2**53)]

    def __post_init__(self) -> None:
        if not 0 <= self.samples_per_second < math.inf or not math.isfinite(self.loss):
            raise ValueError("a speed is finite and >= 0, a loss is finite")


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


_SUFFIXES: dict[type[msgspec.Struct], str] = {
    MetricsRecord: "metrics",
    HeldoutRecord: "heldout",
    AccountRecord: "account",
}


def metrics_key(run_id: str, kind: type[msgspec.Struct] = MetricsRecord) -> str:
    """The DHT key of a run's metrics of one kind."""
    return f"{run_id}.{_SUFFIXES[kind]}"


async def publish_metrics(
    dht: DhtNode,
    own_id: PeerId,
    run_id: str,
    record: MetricsRecord | HeldoutRecord | AccountRecord,
    ttl_s: float = TTL_S,
) -> None:
    """Publish this peer's metrics or account; errors are only logged, since nothing depends on them."""
    key = metrics_key(run_id, type(record))
    try:
        await dht.store(key, msgspec.to_builtins(record, builtin_types=(bytes,)), ttl_s, subkey=own_id)
    except ManyhandsError as error:
        logger.warning("%s of step %d cannot be published: %s", key, record.step, error)


async def read_metrics(dht: DhtNode, run_id: str, kind: type[R]) -> Mapping[PeerId, R]:
    """The last metrics of one kind of each peer; unreadable ones are skipped.

    Raises:
        Unavailable: the DHT does not answer.
    """
    records, key, decoder = {}, metrics_key(run_id, kind), msgspec.msgpack.Decoder(kind)
    for subkey, stored in (await dht.get(key)).items():
        if stored.owner != subkey:
            continue
        try:
            records[PeerId(subkey)] = decoder.decode(stored.raw)
        except msgspec.DecodeError as error:
            logger.warning("%s of peer %s cannot be read: %s", key, subkey, error)
    return records
