"""The DHT record of each peer of a run: publishes this peer's, and reads those of the others.

A record says where in the run its peer is, and how it can be reached. Optimizers say in it how far they are towards the
next global step (:mod:`manyhands.optim.run.progress`), averagers which tensors they average
(:mod:`manyhands.averaging.averager_presence`). Their records lie under different keys, so optimizers and averagers of
one run id never take each other for their own kind.

Records are signed, and published when they change, and again before they expire. A record counts until it expires, a
later one replaces it, or its peer says goodbye. A peer that did not come to a round, or sent no state, is *missing*
until something new is learnt of it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import msgspec

from manyhands.averaging.grid.seats import NO_SEAT, Seat
from manyhands.averaging.messages import Count, Digest, Position, readable_addresses
from manyhands.averaging.sketch import MAX_SKETCH_BYTES
from manyhands.averaging.timing import DAY_S, MOMENT_S, RECORD_S
from manyhands.base.address import MAX_ADDRESSES, AddressTexts
from manyhands.base.deadline import time_limit, wait_at_most
from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.dht import DhtNode, Schema, StoredValue
from manyhands.rpc import Endpoint
from manyhands.rpc.ways import PUNCHED
from manyhands.runtime.concurrently import gathered

logger = logging.getLogger(__name__)

PROGRESS_KIND, AVERAGING_KIND = "progress", "averaging"
"""The kinds in the DHT keys of the records: of optimizers, and of averagers."""
GOODBYE = "goodbye"
"""Published instead of a record by a peer that leaves on purpose."""
KEEP_ALIVES = 3
"""Records published in the lifetime of one: two may get lost before the others consider the peer gone."""
NUM_PARTS = 5
"""The number of all peers is estimated from at most this many of the last partial reads. Each of them asks
one of a key's five holders."""
MAX_WALL_TIME = 1e11
"""Seconds since 1970: the year 5138."""


class PeerRecord(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The record that a peer publishes about itself, under its own signature.

    Fields with their default are not sent, so an optimizer sends none of an averager's fields, and the other way round.

    Attributes:
        position: the peer's position; the ``step`` of an averager is the number of its round.
        is_client: whether it cannot be dialled.
        is_punched: whether another peer that cannot be dialled either is connected to it without a relay.
        relay: a peer that forwards its connection to another one; empty if there is none.
        ttl_s: lifetime of the record.
        seat: its place among the groups of a run that is too large for one.
        sketch: numbers computed from its values after its last step, as float32, to compare peers by; an averager
            has them in a grid alone. See :mod:`manyhands.averaging.sketch`.
        sketch_step: the peer's step when it computed the sketch; 0 without a sketch.
        samples: accumulated since the last global step, and counted ``counted_s_ago`` seconds before publication.
        lineage_samples: samples in all the committed steps that led to this position.
        batch_s: seconds for a batch; 0 if not known yet.
        is_auxiliary: whether it has no data; it averages with the others, and may lead where none of them can.
        began_at: start of its process, by its own wall clock, which tells two processes with one identity apart.
        claim: at step 0, why the run should begin from its parameters; see
            :class:`manyhands.optim.run.progress.Claim`.
        tensors: fingerprint of an averager's list of tensors, which ``summary`` has in words.
        num_steps: number of steps that an averager has begun.
    """

    position: Position
    is_client: bool
    addresses: AddressTexts
    ttl_s: float = RECORD_S
    seat: Seat = NO_SEAT
    sketch: Annotated[bytes, msgspec.Meta(max_length=MAX_SKETCH_BYTES)] = b""
    sketch_step: Count = 0
    # of an optimizer
    samples: Count = 0
    samples_per_second: float = 0.0
    lineage_samples: Count = 0
    counted_s_ago: float = 0.0
    batch_s: float = 0.0
    is_auxiliary: bool = False
    began_at: float = 0.0
    claim: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    # of an averager
    tensors: Digest = b""
    summary: Annotated[str, msgspec.Meta(max_length=400)] = ""
    num_steps: Count = 0
    # of a peer in client mode
    is_punched: bool = False
    relay: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def __post_init__(self) -> None:
        numbers = (self.samples_per_second, self.ttl_s, self.counted_s_ago, self.batch_s)
        if not (all(0 <= number < math.inf for number in numbers) and 0 <= self.began_at < MAX_WALL_TIME):
            raise ValueError("a speed or a time is negative, too large or not finite")


PEER_RECORD = Schema(PeerRecord | Literal["goodbye"], is_owned=True, max_ttl_s=DAY_S)


def peer_key(run_id: str, kind: str) -> str:
    """The DHT key of a run's records of a kind."""
    return f"{run_id}.{kind}"


class SeenRecord(msgspec.Struct, frozen=True, gc=False):
    """A record of another peer. It is replaced, and never changed, when something new is learnt of the peer.

    Attributes:
        expires_at: until when it counts (loop time).
        is_direct: whether it was learnt from a round or from the peer itself, not from the DHT.
    """

    record: PeerRecord
    expires_at: float
    is_direct: bool = False

    @property
    def since(self) -> float:
        """When it was published (loop time)."""
        return self.expires_at - self.record.ttl_s


def _is_outdated(known: SeenRecord, news: SeenRecord) -> bool:
    """Whether a record that is read now is older than what is known of its peer."""
    here, there = known.record.position, news.record.position
    says_less = news.record.samples < known.record.samples if here == there else there.step < here.step
    was_on_its_way = news.since <= known.since + MOMENT_S
    return says_less and known.is_direct and was_on_its_way


class PeerRecords:
    """The records of the others, as last read, and that of this peer, if it publishes any. Lives on the network thread.

    Args:
        kind: the kind in the key of the records.
        min_period_s: the least time between two records of this peer; a record contains all changes since the last.

    Attributes:
        own: what this peer would publish now; only a peer that publishes has it.
        published: its last record, and when it was published (loop time); None if no holder stored it.
        num_failures: consecutive failures to publish it.
        num_held: how many records there are, by the last read of all, or as a holder said since.
        last_said_goodbye: whether none of the other peers is left, and the last one left on purpose.
    """

    own: PeerRecord

    def __init__(self, endpoint: Endpoint, dht: DhtNode, run_id: str, kind: str, min_period_s: float = 0.0) -> None:
        self._endpoint = endpoint
        self._dht = dht
        self._run_id = run_id
        self._key = peer_key(run_id, kind)
        self._min_period_s = min_period_s
        self.published: tuple[PeerRecord, float] | None = None
        self.num_failures = 0
        self._changed = asyncio.Event()
        self._is_urgent = asyncio.Event()
        self._seen: dict[PeerId, SeenRecord] = {}
        self._sequences: dict[str, int] = {}  # by peer id, also of those that said goodbye
        self._missing: dict[PeerId, SeenRecord] = {}
        self._observed: Mapping[PeerId, SeenRecord] = {}
        self._observed_until = -math.inf  # loop time
        self._version = 0
        self.num_held = 0
        self.last_said_goodbye = False
        self._parts: deque[tuple[int, int, int]] = deque(maxlen=NUM_PARTS)  # records that count, shown and held

    def _look_at_own(self, seen: SeenRecord, now: float) -> None:
        """Hook for subclasses: a record under this peer's own id was read."""

    def _brought_up_to_date(self, peer_id: PeerId, seen: SeenRecord) -> SeenRecord:
        """Hook for subclasses: the first record of a peer, changed by what is known of it otherwise."""
        return seen

    def _surplus(self) -> Collection[PeerId]:
        """Hook for subclasses: the peers that do not count although their records were read, as there are too many."""
        return ()

    def observed(self) -> Mapping[PeerId, SeenRecord]:
        """The records that count now: the same mapping until a record changes, comes, goes or expires."""
        now = asyncio.get_running_loop().time()
        if now >= self._observed_until:
            self._observed = {peer_id: seen for peer_id, seen in self._seen.items() if seen.expires_at > now}
            self._observed_until = min([seen.expires_at for seen in self._observed.values()], default=math.inf)
            self._version += 1
        return self._observed

    def records(self) -> dict[PeerId, PeerRecord]:
        return {peer_id: seen.record for peer_id, seen in self.observed().items()}

    @property
    def version(self) -> int:
        """A number that changes with each mapping that :meth:`observed` returns."""
        self.observed()
        return self._version

    async def refresh(self, *, quickly: bool = False) -> None:
        """Read the records of all peers.

        Args:
            quickly: read from one holder only. It may lack some records; earlier reads of these still count.
        Raises:
            Unavailable: the DHT does not answer; earlier reads count until they expire.
        """
        answer = await self._dht.get(self._key, quickly=quickly)
        self._take_in_all(answer)
        self.num_held = len(answer)
        self._forget_outdated(answer.keys())

    async def refresh_named(self, names: Collection[PeerId], most: int, *, quickly: bool = False) -> None:
        """Read the records of these peers, and of some random ones, which stand for themselves alone.

        Args:
            most: number of random peers; see :meth:`manyhands.dht.DhtNode.get_part`.
            quickly: as for :meth:`refresh`, which has the error, too.
        """

        async def read_named() -> Mapping[str, StoredValue]:
            named = await self._dht.get(self._key, quickly=quickly, owners=names)
            self._take_in_all(named)  # also if the other read fails
            return named

        async def read_others() -> Mapping[str, StoredValue]:
            part = await self._dht.get_part(self._key, most)
            self._take_in_all(part.values)
            self.num_held = part.num_held
            return part.values

        named, others = await gathered(read_named(), read_others())
        self._forget_outdated(named.keys() | others.keys())

    def _forget_outdated(self, read: Collection[str]) -> None:
        """After a read that was no sample: forget the samples, and the sequence numbers of records that are gone."""
        self._sequences = {
            peer: number for peer, number in self._sequences.items() if peer in read or peer in self._seen
        }
        if self._parts:
            self._parts.clear()
            self._note_change()

    async def refresh_part(self, most: int, names: Collection[PeerId]) -> None:
        """Read the records of some random peers, and of these named ones.

        Args:
            most: number of random peers; see :meth:`manyhands.dht.DhtNode.get_part`.
        Raises:
            Unavailable: as :meth:`refresh`.
        """
        part = await self._dht.get_part(self._key, most)
        self.num_held = part.num_held
        is_partial = part.num_shown < part.num_held
        named = await self._dht.get(self._key, quickly=True, owners=names) if names and is_partial else {}
        self._take_in_all(named | part.values)
        if is_partial or self._parts:  # one holder that has few records, or says so, does not end the estimate
            num_counting = sum(subkey in self._seen or subkey == self._endpoint.peer_id for subkey in part.values)
            self._parts.append((num_counting, part.num_shown, part.num_held))
        self._note_change()

    @property
    def is_partial(self) -> bool:
        """Whether the last reads were of a part of the records."""
        return bool(self._parts)

    @property
    def weight(self) -> float:
        """How many peers each known record stands for: 1 if all records were read.

        The number of records is the median of what the last holders said, as one of them may lie.
        """
        if not self._parts:
            return 1.0
        share = sum(counting for counting, _, _ in self._parts) / max(sum(shown for _, shown, _ in self._parts), 1)
        num_others = statistics.median(held for _, _, held in self._parts) * share - 1
        return max(num_others / max(len(self.observed()), 1), 1.0)

    def _take_in_all(self, answer: Mapping[str, StoredValue]) -> None:
        now = asyncio.get_running_loop().time()
        own_id = self._endpoint.peer_id
        sequences = self._sequences
        for subkey, stored in answer.items():
            if stored.owner == subkey and (subkey == own_id or stored.sequence > sequences.get(subkey, -1)):
                self._take_in(PeerId(subkey), stored, now)
        gate = self._endpoint.gates.get(self._run_id)
        for peer_id, seen in list(self._seen.items()):
            if seen.expires_at <= now or (gate is not None and gate.is_banned(peer_id)):
                self._drop(peer_id)
        for peer_id in self._surplus():
            self._drop(peer_id)
        self._missing = dict(self.missing())

    def _take_in(self, peer_id: PeerId, stored: StoredValue, now: float) -> None:
        is_own = peer_id == self._endpoint.peer_id
        if not is_own:
            self._sequences[peer_id] = stored.sequence
        try:
            record = PEER_RECORD.decode(stored.raw)
        except msgspec.ValidationError as error:
            if not is_own:
                self._endpoint.counters["bad_records"] += 1
                logger.warning("The record of peer %s cannot be read: %s", peer_id, error)
            return
        known = self._seen.get(peer_id)
        if record == GOODBYE:  # however it was encoded
            if known is not None:
                self._drop(peer_id)
                self.last_said_goodbye = not self.observed()
            return
        seen = SeenRecord(record, now + min(stored.remaining_s, record.ttl_s))
        if is_own:
            self._look_at_own(seen, now)
        elif known is None or not _is_outdated(known, seen):
            self._keep(peer_id, seen if known is not None else self._brought_up_to_date(peer_id, seen))
            if known is None or known.record.addresses != record.addresses:
                self._endpoint.learn(peer_id, readable_addresses(record.addresses))

    def forget(self, peer_id: PeerId) -> None:
        """Drop what is known of a peer, until a later record of it is read."""
        if peer_id in self._seen:
            self._drop(peer_id)

    def report_missing(self, peer_id: PeerId) -> None:
        """A peer did not come, or sent no state."""
        if (seen := self.observed().get(peer_id)) is not None:
            self._missing[peer_id] = seen
            self._note_change()

    def missing(self) -> Mapping[PeerId, SeenRecord]:
        observed = self.observed()
        return {peer_id: seen for peer_id, seen in self._missing.items() if observed.get(peer_id) is seen}

    def _keep(self, peer_id: PeerId, seen: SeenRecord) -> None:
        self._seen[peer_id] = seen
        self.last_said_goodbye = False
        self._note_change()

    def _drop(self, peer_id: PeerId) -> None:
        del self._seen[peer_id]
        self._note_change()

    def _note_change(self) -> None:
        """Make :meth:`observed` return a new mapping."""
        self._observed_until = -math.inf

    # this peer

    def _set_own(self, **changes: object) -> None:
        is_client = self._endpoint.client_mode
        self.own = msgspec.structs.replace(self.own, is_client=is_client, **changes)

    def _record_to_publish(self) -> PeerRecord | None:
        """The record to publish now; None to publish nothing."""
        return msgspec.structs.replace(self.own, addresses=self._addresses(), **self._ways())

    def _ways(self) -> dict[str, Any]:
        """The fields that say how this peer is connected to others if it cannot be dialled."""
        ways = set(self._endpoint.ways().values()) if self._endpoint.client_mode else set()
        relays = sorted(way.relay for way in ways if way.relay is not None)
        return {"is_punched": PUNCHED in ways, "relay": relays[0] if relays else ""}

    def _addresses(self) -> list[str]:
        """This peer's addresses now: they may change while it runs."""
        return [str(address) for address in self._endpoint.addresses[:MAX_ADDRESSES]]

    def publish_soon(self, *, urgently: bool = False) -> None:
        """Publish a changed record; with ``urgently`` before the end of the period."""
        self._changed.set()
        if urgently:
            self._is_urgent.set()

    async def publish_forever(self) -> None:
        """Publish changes, and renew the record before it expires."""
        while True:
            await wait_at_most(self._is_urgent, self._min_period_s)
            await wait_at_most(self._changed, self._ttl_s() / KEEP_ALIVES)
            self._changed.clear()
            self._is_urgent.clear()
            await self.publish()

    def _ttl_s(self) -> float:
        return self.own.ttl_s

    async def publish(self) -> None:
        """Publish the record now."""
        record = self._record_to_publish()
        if record is None:
            return
        self.published = (record, asyncio.get_running_loop().time())
        num_holders = 0
        try:
            value = msgspec.to_builtins(record, builtin_types=(bytes,))
            num_holders = await self._dht.store(self._key, value, self._ttl_s(), subkey=self._endpoint.peer_id)
        except ManyhandsError as error:
            logger.warning("The record of this peer under %s was not published: %s", self._key, error)
        self.num_failures = 0 if num_holders else self.num_failures + 1
        if not num_holders:
            self.published = None

    async def say_goodbye(self) -> None:
        """Tell the others that this peer leaves the run, within ``MOMENT_S``.

        If that fails, they notice it when the record expires.
        """
        try:
            async with time_limit(MOMENT_S, "saying goodbye to the run"):
                await self._dht.store(self._key, GOODBYE, self._ttl_s(), subkey=self._endpoint.peer_id)
        except ManyhandsError as error:
            logger.debug("the others are not told that this peer left: %s", error)
