"""The presence of the averagers of a run: each one's current round, and in a large swarm its place in the grid.

Every peer publishes a signed record in the DHT, and reads those of the others when it steps. There is no state to load,
so a position is only a meeting point. A peer that missed a round, or is new, goes to the leading position: the highest
(round number, lineage) that a peer with the same tensors has published. Two parts of a split swarm find each other
again by the same rule.

A peer may publish any round number, and the others then meet there: that changes no value. Round numbers without room
for the next one are ignored, and after ``LAST_ROUND`` the count begins again at 0, so no peer can use them up.

A swarm of more than ``max_group_size`` forms a grid (:mod:`manyhands.averaging.grid.seats`), where several groups
average in each round. A step is then several rounds, and begins at a multiple of their number. Whatever its groups
commit, a peer goes on to the next round, so all have one lineage there.

An expected peer that did not come is waited for only ``GRACE_S`` and leads no group, until it publishes that it has
begun another step. A peer whose connection broke is not waited for before its next record.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Literal

import msgspec

from manyhands.averaging.grid.seats import NO_SEAT, PublishedSeat, Seat, Step, next_step
from manyhands.averaging.messages import MAX_ADDRESSES, AddressText, Count, Digest, Position, RoundManifest
from manyhands.averaging.peer_records import (
    GOODBYE,
    RecordPublisher,
    RecordReader,
    SeenRecord,
    UntilFresh,
)
from manyhands.averaging.sketch import MAX_SKETCH_BYTES, disagreement_of
from manyhands.base.errors import ManifestMismatch, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.run_id import is_run_id
from manyhands.dht import DhtNode, Schema, StoredValue
from manyhands.rpc import Endpoint
from manyhands.rpc.frames import readable
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

PRESENCE_KIND = "averaging"
"""Of the DHT keys of the records."""
MAX_OTHER_RUNS = 8
"""Other runs that are looked at where a run id may be mistyped."""
LAST_ROUND = 2**48
"""Round numbers go up to here: 8,900 years of a thousand rounds a second."""
MAX_TTL_S = 3600.0
TTL_S = 30.0
MIN_PERIOD_S = 0.1
"""Between two records: what happens meanwhile is in the second one."""
GRACE_S = 1.0
"""Wait, from the beginning of a step, for peers that missed the last one: they may just have begun theirs."""


class PresenceRecord(msgspec.Struct, frozen=True):
    """What a peer publishes about itself, under its own signature.

    Attributes:
        position: of the peer; ``step`` is the round number.
        tensors: fingerprint of its list.
        summary: the list in words.
        num_steps: how many steps it has begun.
        seat: its place among the groups of a swarm that is too large for one, as of its position.
        sketch: some of its values after its last step in a grid, as float32.
        sketch_round: the round number that the step ended with; 0 without one.
    """

    position: Position
    tensors: Digest
    summary: Annotated[str, msgspec.Meta(max_length=400)]
    num_steps: Count
    is_client: bool
    addresses: Annotated[list[AddressText], msgspec.Meta(max_length=MAX_ADDRESSES)]
    seat: Seat = NO_SEAT
    sketch: Annotated[bytes, msgspec.Meta(max_length=MAX_SKETCH_BYTES)] = b""
    sketch_round: Count = 0

    def __post_init__(self) -> None:
        if self.position.step > LAST_ROUND:
            raise ValueError(f"round numbers go up to {LAST_ROUND}")

    def published_seat(self) -> PublishedSeat:
        return PublishedSeat(self.position.step, self.seat)


PRESENCE = Schema(PresenceRecord | Literal["goodbye"], is_owned=True, max_ttl_s=MAX_TTL_S)
Seen = SeenRecord[PresenceRecord]


def presence_key(run_id: str) -> str:
    """The DHT key of the records."""
    return f"{run_id}.{PRESENCE_KIND}"


def first_position(run_id: str) -> Position:
    """The first position of all peers."""
    return Position(0, hashlib.sha256(f"averaging {run_id}".encode()).digest())


def next_position(position: Position, manifest: RoundManifest) -> Position:
    """The position after a committed round; after the last round number comes 0."""
    after = position.after(manifest)
    return after if after.step <= LAST_ROUND else Position(0, after.lineage)


def order_of(position: Position) -> tuple[int, bytes]:
    """Orders positions: the higher one leads."""
    return (position.step, position.lineage)


class PresenceReader(RecordReader[PresenceRecord, Seen]):
    def _seen_as(self, known: Seen | None, record: PresenceRecord, stored: StoredValue, now: float) -> Seen:
        return SeenRecord(record, stored.sequence, now + min(stored.remaining_s, MAX_TTL_S))


class PresenceTracker:
    """The positions of this averager and the others of its run. Lives on the network thread.

    It is the :class:`manyhands.averaging.matchmaking.candidates.Roster` of the rounds, and in a grid the
    :class:`manyhands.averaging.grid.step.GridPlace`.

    Args:
        tensors: fingerprint of this peer's list; ``summary`` is the list in words.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dht: DhtNode,
        run_id: str,
        tensors: bytes,
        summary: str,
        *,
        max_group_size: int,
        rng: random.Random,
    ) -> None:
        self._endpoint = endpoint
        self._dht = dht
        self._run_id = run_id
        self._key = presence_key(run_id)
        self._own = PresenceRecord(first_position(run_id), tensors, summary, 0, endpoint.client_mode, [])
        self.reader = PresenceReader(endpoint, dht, self._key, PRESENCE)
        self._publisher = RecordPublisher(
            dht, self._key, endpoint.peer_id, self._record_to_publish, lambda: TTL_S, MIN_PERIOD_S
        )
        self._missing = UntilFresh(self.reader)
        self._absent: dict[PeerId, int] = {}  # connected, but did not come: until they have begun more steps than this
        self._grace_until = 0.0  # loop time
        self._max_group_size = max_group_size
        self._rng = rng
        self._step: Step | None = None  # in a grid
        self._mates: tuple[int, Position, list[PeerId]] | None = None  # as of which records, and where
        self.called = asyncio.Event()
        self._tasks = TaskOwner("presence")

    async def start(self) -> None:
        """Join the averagers of the run; raises ManifestMismatch if their tensors differ."""
        self._dht.declare(self._key, PRESENCE)
        await self.refresh()
        self._check_fits(is_published=False)
        self._go_to(self.leading())
        await self._publisher.publish()
        await self.refresh()
        try:
            self._check_fits(is_published=True)  # of two that begin at once, both see both
        except ManifestMismatch:
            await self._publisher.say_goodbye()
            raise
        self._tasks.spawn(self._publisher.publish_forever(), name="publishing")

    async def elsewhere(self) -> list[str]:
        """Run ids under which others average, and this peer does not; empty if others are in this run."""
        if self.reader.observed():
            return []
        run_ids = sorted(filter(is_run_id, await self._dht.topics(PRESENCE_KIND)))[:MAX_OTHER_RUNS]
        try:
            found = await asyncio.gather(*(self._dht.get(presence_key(run_id)) for run_id in run_ids))
        except Unavailable:
            return []
        members = [
            {subkey for subkey, stored in records.items() if stored.owner == subkey and stored.value != GOODBYE}
            for records in found
        ]
        own_id = self._endpoint.peer_id
        return [run_id for run_id, peers in zip(run_ids, members, strict=True) if peers and own_id not in peers]

    async def close(self) -> None:
        """Tell the others that this peer has left."""
        await self._tasks.close()
        await self._publisher.say_goodbye()

    # the roster

    def position(self) -> Position:
        if self._step is None:
            return self._own.position
        return msgspec.structs.replace(self._own.position, group_key=self._step.key(self._own.position.step))

    def expected(self) -> Mapping[PeerId, bool]:
        """The peers at this position, or behind: these come here when they step. True for those that cannot lead."""
        is_grace = asyncio.get_running_loop().time() < self._grace_until
        observed, missing, expected = self.reader.observed(), self._missing.peers(), {}
        for peer_id in self._nearby():
            record = observed[peer_id].record
            if self._is_absent(peer_id, record):
                if is_grace:
                    expected[peer_id] = True
            elif peer_id not in missing:
                expected[peer_id] = record.is_client
        return expected

    def _nearby(self) -> Iterable[PeerId]:
        """The peers that belong in this peer's group."""
        step, position = self._step, self._own.position
        if step is None:
            own = order_of(position)
            return [peer_id for peer_id, record in self._fitting().items() if order_of(record.position) <= own]
        version = self.reader.version
        if self._mates is None or self._mates[:2] != (version, position):
            fitting = self._fitting().items()
            mates = [
                peer_id for peer_id, record in fitting if step.is_mate(peer_id, record.published_seat(), position.step)
            ]
            self._mates = (version, position, mates)
        return self._mates[2]

    def is_known(self, peer_id: PeerId) -> bool:
        """Whether a peer has published its position, with matching tensors."""
        seen = self.reader.observed().get(peer_id)
        return seen is not None and seen.record.tensors == self._own.tensors

    async def refresh(self) -> None:
        await self.reader.refresh()
        observed = self.reader.observed()
        self._absent = {peer_id: num_steps for peer_id, num_steps in self._absent.items() if peer_id in observed}

    def contributors(self) -> Container[PeerId]:
        """Not known: an averager that comes later would know others."""
        return ()

    def report_missing(self, peer_id: PeerId) -> None:
        self._missing.add(peer_id)
        seen = self.reader.observed().get(peer_id)
        if seen is not None and self._endpoint.is_connected(peer_id):
            self._absent[peer_id] = seen.record.num_steps
        else:
            self._absent.pop(peer_id, None)

    def call_to_round(self) -> None:
        self.called.set()

    # this peer's position

    def begin_step(self) -> None:
        """Begin this peer's next step at the leading position, and choose its place there."""
        self._update(num_steps=self._own.num_steps + 1)
        self._grace_until = asyncio.get_running_loop().time() + GRACE_S
        own, leading = self._own, self.leading()
        others: dict[str, PublishedSeat] = {
            peer_id: record.published_seat() for peer_id, record in self._fitting().items()
        }
        seat = PublishedSeat(own.position.step, own.seat)
        step = next_step(self._endpoint.peer_id, seat, others, self._max_group_size, leading.step, self._rng)
        if not step.layout.sides:
            self._step = None
            self._go_to(leading)
            return
        if step.end > LAST_ROUND:
            step = replace(step, first_round=0)
        if step.layout != own.seat.layout:
            logger.info("%d peers average in groups, laid out as %s", len(others) + 1, step.layout)
        self._step = step
        lineage = hashlib.sha256(f"averaging {self._run_id} in a grid".encode()).digest()  # of all peers there
        self._go_to(Position(step.first_round, lineage), Seat(step.layout, step.cell))

    def catch_up(self) -> None:
        """Go to the leading position, unless this peer is in a grid, where a step begins at its own place."""
        if self._step is None:
            self._go_to(self.leading())

    def move(self, manifest: RoundManifest) -> None:
        """Go on from a committed round of this peer."""
        if self._step is None:
            self._go_to(next_position(self._own.position, manifest))

    @property
    def num_rounds(self) -> int:
        return 1 if self._step is None else self._step.layout.num_rounds

    @property
    def num_rounds_left(self) -> int | None:
        return None if self._step is None else self._step.end - self._own.position.step

    def next_round(self) -> None:
        assert self._step is not None
        number = min(self._own.position.step + 1, self._step.end)
        seat = Seat(self._step.layout, self._step.own_cell(number))
        self._go_to(Position(number, self._own.position.lineage), seat)

    def is_left_behind(self) -> bool:
        return self.leading().step > self._own.position.step

    def tell(self, sketch: bytes) -> None:
        """In a grid: set the published sample of this peer's values after its step."""
        self._update(sketch=sketch, sketch_round=self._own.position.step)

    def disagreement(self) -> float | None:
        """The distance between the peers after this peer's last step, by what they published."""
        own, fitting = self._own, self._fitting().values()
        others = [record.sketch for record in fitting if record.sketch_round == own.sketch_round]
        return disagreement_of([own.sketch, *others])

    def leading(self) -> Position:
        """The highest position of the peers whose tensors match."""
        positions = [record.position for record in self._fitting().values()]
        return max([self._own.position, *positions], key=order_of)

    def holders(self) -> tuple[Position, list[PeerId]]:
        """The highest position of the others that this peer can ask, and who is there."""
        positions = {
            peer_id: record.position
            for peer_id, record in self._fitting().items()
            if not record.is_client or self._endpoint.is_connected(peer_id)
        }
        leading = max(positions.values(), key=order_of, default=self._own.position)
        return leading, [peer_id for peer_id, position in positions.items() if position == leading]

    def is_ahead_of(self, peers: Iterable[PeerId]) -> bool:
        """Whether one of these peers is behind this one, as last read; peers that left or are missing do not count."""
        own, fitting, missing = order_of(self._own.position), self._fitting(), self._missing.peers()
        return any(
            order_of(record.position) < own and not self._is_absent(peer_id, record) and peer_id not in missing
            for peer_id in peers
            if (record := fitting.get(peer_id)) is not None
        )

    def num_peers(self) -> int:
        """Peers with matching tensors, with this one, as last read."""
        return len(self._fitting()) + 1

    def misfits(self) -> list[str]:
        """The peers whose tensors differ from this peer's, and how; one line each."""
        return [
            f"the tensors of peer {peer_id} differ: it has {readable(seen.record.summary)}; "
            f"here there are {self._own.summary}"
            for peer_id, seen in sorted(self.reader.observed().items())
            if seen.record.tensors != self._own.tensors
        ]

    def _go_to(self, position: Position, seat: Seat = NO_SEAT) -> None:
        if position != self._own.position:
            self.called.clear()
        if (position, seat) != (self._own.position, self._own.seat):
            self._update(position=position, seat=seat)

    def _update(self, **changes: object) -> None:
        self._own = msgspec.structs.replace(self._own, is_client=self._endpoint.client_mode, **changes)
        self._publisher.publish_soon()

    def _record_to_publish(self) -> PresenceRecord:
        addresses = [str(address) for address in self._endpoint.addresses[:MAX_ADDRESSES]]
        return msgspec.structs.replace(self._own, addresses=addresses)

    def _fitting(self) -> dict[PeerId, PresenceRecord]:
        """Of the peers whose tensors match."""
        observed = self.reader.observed().items()
        return {peer_id: seen.record for peer_id, seen in observed if seen.record.tensors == self._own.tensors}

    def _is_absent(self, peer_id: PeerId, record: PresenceRecord) -> bool:
        """Whether a peer stayed connected and did not come, and has begun no step since."""
        return self._absent.get(peer_id) == record.num_steps

    def _check_fits(self, *, is_published: bool) -> None:
        """Check this peer's tensors against the most common ones; of equally common, those of the lowest peer id."""
        owners: dict[bytes, list[PeerId]] = defaultdict(list)
        for peer_id, seen in self.reader.observed().items():
            owners[seen.record.tensors].append(peer_id)
        if not owners:
            return
        if is_published:
            owners[self._own.tensors].append(self._endpoint.peer_id)
        chosen = min(owners, key=lambda tensors: (-len(owners[tensors]), min(owners[tensors])))
        if chosen != self._own.tensors:
            raise ManifestMismatch(self._run_id, self.misfits()[:3])
