"""The records that peers publish for monitors: metrics of global steps, and an account of each peer.

An account has the peer's name, its counts, and a list of contributors for each of its last steps: which peers
contributed how many samples. All members of a round have the same manifest, so they publish the same list, and a
monitor believes the list that most of them publish (:mod:`manyhands.monitor.credit`). This module imports no torch.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import struct
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec

from manyhands.averaging.messages import SHORT_ID_BYTES, Count, Digest, Position, short_id
from manyhands.averaging.roster import lineage_with
from manyhands.averaging.timing import METRICS_S
from manyhands.base.errors import ConfigError, ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.base.structs import make_ready
from manyhands.dht import DhtNode

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=msgspec.Struct)
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
MAX_NAME = 32  # characters
MAX_FAILURE = 200  # characters
MAX_LEARNING_RATE = 1e6
NUM_STEPS = 8
"""Number of the last committed steps in a record, so that a monitor that reads it every few seconds misses none."""
SHARE_BYTES = SHORT_ID_BYTES + 4  # size of one contributor in a list
MAX_SAMPLES = 2**32 - 1
"""The largest number of samples of one peer in a step that a list can have."""
DIGEST_BYTES = 16
GOLDEN_RATIO = 0x9E3779B97F4A7C15
"""The fractional part of the golden ratio, times 2^64."""
NUM_LISTING = 16
"""Number of contributors to a step that publish its list. The others publish only its digest, so that a key of the DHT
has room for the records of thousands of peers."""
MAX_LISTS_BYTES = 48_000
"""The largest size of all lists in a record together; a value of the DHT has at most 64 KiB."""

Unit = Literal["samples", "tokens", "items"]
"""The unit of the weights; "items" if only the program knows it."""
ShortLineage = Annotated[bytes, msgspec.Meta(min_length=SHORT_ID_BYTES, max_length=SHORT_ID_BYTES)]


class MetricsRecord(msgspec.Struct, frozen=True):
    """One peer's share in the global step ``step``.

    Attributes:
        loss: sum of the losses of its micro-batches.
        mini_steps: number of its micro-batches.
    """

    step: Count
    samples_per_second: float
    samples_accumulated: Count
    loss: float
    mini_steps: Annotated[int, msgspec.Meta(ge=1, le=2**53)]

    def __post_init__(self) -> None:
        if not 0 <= self.samples_per_second < math.inf or not math.isfinite(self.loss):
            raise ValueError("the speed is negative or not finite, or the loss is not finite")


class HeldoutRecord(msgspec.Struct, frozen=True):
    """An evaluator's metrics of the model at one global step, on held-out text.

    Attributes:
        loss: mean over the samples, of masked language modelling (``mlm``) and sentence order (``sop``) together.
    """

    step: Count
    loss: float
    mlm_accuracy: Share
    sop_accuracy: Share
    num_samples: Count

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.loss, self.mlm_accuracy, self.sop_accuracy))):
            raise ValueError("the loss or an accuracy is not finite")


def alone_seal(before: bytes, peer_id: PeerId) -> bytes:
    """The seal of a step that a peer has made alone; see :mod:`manyhands.averaging.roster`."""
    return hashlib.sha256(before + b"alone" + peer_id.encode()).digest()


def alone_lineage(before: bytes, peer_id: PeerId, roster: bytes) -> bytes:
    """The lineage after a step that a peer has made alone.

    Args:
        before: the lineage before it.
        roster: digest of the roster after it.
    """
    return lineage_with(alone_seal(before, peer_id), roster)


def short_lineage(lineage: bytes) -> bytes:
    """The beginning of a lineage, filled up with zeros."""
    return lineage[:SHORT_ID_BYTES].ljust(SHORT_ID_BYTES, b"\0")


class CommittedStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A global step that a peer has made, and the list of its contributors.

    Attributes:
        step: number of global steps after it.
        before: the lineage from which it led.
        after: the beginning of the lineage to which it led.
        is_grid: the list is that of one group of a grid, and other groups have other lists.
        digest: of the fields above and the list.
        shares: the list: short ids and samples of the contributors, packed; empty if other peers publish it.
        roster: digest of the roster after a step that this peer has made alone; else empty.
    """

    step: Count
    before: Digest
    after: ShortLineage
    is_grid: bool
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    shares: Annotated[bytes, msgspec.Meta(max_length=MAX_LISTS_BYTES)] = b""
    roster: Digest = b""

    def __post_init__(self) -> None:
        if len(self.shares) % SHARE_BYTES:
            raise ValueError(f"a list has {SHARE_BYTES} bytes for each contributor")

    def is_proven_alone(self, peer_id: PeerId) -> bool:
        """Whether the lineage proves that this peer has made the step alone; see :func:`alone_lineage`."""
        return self.after == short_lineage(alone_lineage(self.before, peer_id, self.roster))

    def has_true_digest(self) -> bool:
        """Whether the digest is that of the list, and the list is in order and names each peer once."""
        ids = [self.shares[at : at + SHORT_ID_BYTES] for at in range(0, len(self.shares), SHARE_BYTES)]
        is_ordered = all(one < other for one, other in itertools.pairwise(ids))
        return is_ordered and self.digest == digest_of_step(
            self.step, self.before, self.after, self.is_grid, self.shares
        )


def digest_of_step(step: int, before: bytes, after: bytes, is_grid: bool, shares: bytes) -> bytes:
    """The digest of a :class:`CommittedStep`."""
    head = struct.pack(">Q?", step, is_grid)
    return hashlib.sha256(head + before + after + shares).digest()[:DIGEST_BYTES]


def packed(shares: Mapping[bytes, int]) -> bytes:
    """Encode the samples of each contributor, by short id, as bytes; in the order of the ids."""
    return b"".join(peer + struct.pack(">I", samples) for peer, samples in sorted(shares.items()))


def unpacked(shares: bytes) -> dict[bytes, int]:
    """The inverse of :func:`packed`."""
    return dict(struct.iter_unpack(f">{SHORT_ID_BYTES}sI", shares))


class AccountRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The account of a peer: it publishes it about itself, under its own signature, after each global step.

    The counts not described here are those of :class:`manyhands.optim.step.global_step.Statistics`.

    Attributes:
        name: chosen by the peer's owner; empty without one.
        step: the last global step that the peer has made or loaded.
        learning_rate: of its next step; None if unknown or out of bounds.
        bytes_sent: over the network since the global step before.
        failed_step: the last global step in which its samples did not count at once; 0 if they always did.
        failure: why they did not; empty if they always did.
        unit: of the weights in ``steps``; None before its first batch.
        steps: its last committed steps, in order.
    """

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    version: Annotated[str, msgspec.Meta(max_length=32)] = ""
    device: Annotated[str, msgspec.Meta(max_length=80)] = ""
    step: Count = 0
    learning_rate: Annotated[float, msgspec.Meta(ge=0, le=MAX_LEARNING_RATE)] | None = None
    bytes_sent: Count = 0
    samples_used: Count = 0
    samples_dropped: Count = 0
    rounds_committed: Count = 0
    rounds_aborted: Count = 0
    states_loaded: Count = 0
    parameters_reloaded: Count = 0
    failed_step: Count = 0
    failure: Annotated[str, msgspec.Meta(max_length=MAX_FAILURE)] = ""
    has_left: bool = False
    unit: Unit | None = None
    steps: Annotated[list[CommittedStep], msgspec.Meta(max_length=NUM_STEPS)] = []

    def __post_init__(self) -> None:
        if not all(text.isprintable() for text in (self.name, self.version, self.device, self.failure)):
            raise ValueError("a text has characters that cannot be printed")
        steps = [made.step for made in self.steps]
        if any(one >= other for one, other in itertools.pairwise(steps)):
            raise ValueError("its steps are not in ascending order")


make_ready(AccountRecord)


_SUFFIXES: dict[type[msgspec.Struct], str] = {
    MetricsRecord: "metrics",
    HeldoutRecord: "heldout",
    AccountRecord: "account",
}


def metrics_key(run_id: str, kind: type[msgspec.Struct] = MetricsRecord) -> str:
    """The DHT key of a run's records of one kind."""
    return f"{run_id}.{_SUFFIXES[kind]}"


async def publish_metrics(
    dht: DhtNode,
    own_id: PeerId,
    run_id: str,
    record: MetricsRecord | HeldoutRecord | AccountRecord,
    ttl_s: float = METRICS_S,
) -> None:
    """Publish this peer's metrics or account. Errors are only logged, as training does not depend on these records."""
    key = metrics_key(run_id, type(record))
    try:
        await dht.store(key, msgspec.to_builtins(record, builtin_types=(bytes,)), ttl_s, subkey=own_id)
    except ManyhandsError as error:
        logger.warning("%s of step %d is not published, so monitors lack it: %s", key, record.step, error)


async def read_metrics(dht: DhtNode, run_id: str, kind: type[R]) -> Mapping[PeerId, R]:
    """The last record of one kind of each peer; unreadable ones are skipped.

    Raises:
        Unavailable: the DHT does not answer.
    """
    records = {}
    key = metrics_key(run_id, kind)
    decoder = msgspec.msgpack.Decoder(kind)
    for subkey, stored in (await dht.get(key)).items():
        if stored.owner != subkey:
            continue
        try:
            records[PeerId(subkey)] = decoder.decode(stored.raw)
        except msgspec.DecodeError as error:
            logger.warning("%s of peer %s cannot be read: %s", key, subkey, error)
    return records


def checked_name(name: str) -> str:
    """Return the name under which a peer is shown; raise ``ConfigError`` if it is empty, too long or not printable."""
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"name {name[:40]!r} cannot be used; it must have 1 to {MAX_NAME} printable characters and no space at "
            "either end, for example --name alice"
        )
    return name


class Failure(msgspec.Struct, frozen=True):
    """Why samples of this peer did not count at once in the global step ``step``."""

    step: int
    reason: str


class RecentSteps:
    """The last global steps that a peer has made, for its :class:`AccountRecord`.

    Args:
        num_fragments: of local steps. Each sample counts in so many steps, in each with an equal part of its weight.
            The sums of a step are rounded up in some steps and down in others, so that totals over many steps are
            right.
    """

    def __init__(self, own_id: PeerId, num_fragments: int = 1) -> None:
        self._own_id = short_id(own_id)
        self._num_fragments = num_fragments
        self._steps: deque[CommittedStep] = deque(maxlen=NUM_STEPS)

    def add(
        self,
        left: Position,
        reached: Position,
        shares: Mapping[PeerId, float],
        *,
        is_grid: bool = False,
        roster: bytes = b"",
    ) -> None:
        """Add a step that was made.

        Args:
            left: the position before it.
            reached: the position after it.
            shares: the weight of each contributor; empty if the step left the parameters unchanged.
            roster: digest of the roster after the step, if this peer has made it alone.
        """
        parts = self._num_fragments
        # what is added before rounding down: from 0 to parts - 1, each equally often over any series of steps
        added = (reached.step * GOLDEN_RATIO % 2**64) * parts >> 64
        counted = {
            short_id(peer_id): min((round(weight * parts) + added) // parts, MAX_SAMPLES)
            for peer_id, weight in shares.items()
        }
        lists = packed(counted)
        before = left.lineage
        after = short_lineage(reached.lineage)
        digest = digest_of_step(reached.step, before, after, is_grid, lists)
        listing = sorted(counted, key=lambda peer: hashlib.sha256(after + peer).digest())[:NUM_LISTING]
        is_listing = self._own_id in listing and len(lists) <= MAX_LISTS_BYTES
        listed = lists if is_listing else b""
        self._steps.append(CommittedStep(reached.step, before, after, is_grid, digest, listed, roster))

    def forget_from(self, step: int) -> None:
        """Forget this step and later ones: this peer goes on from an earlier state."""
        while self._steps and self._steps[-1].step >= step:
            self._steps.pop()

    def listed(self) -> list[CommittedStep]:
        """The last steps, as many as have lists that fit into one record together; older ones are forgotten."""
        while sum(len(made.shares) for made in self._steps) > MAX_LISTS_BYTES:
            self._steps.popleft()
        return list(self._steps)
