"""Who averages under a run id without an optimizer, and at which round each peer is.

Every peer publishes a signed record in the DHT, and reads those of the others when it steps. There is no state to
load, so a peer's position is only where the peers meet: who missed a round, or comes new, goes to the leading position,
the highest (round number, lineage) that a peer with the same tensors has published. Two parts of a swarm that was split
find each other again by the same rule.

A peer may publish whatever round number it likes, and the others then meet there: that changes no value. Round numbers
that would not leave room for the next one are not believed, and after ``LAST_ROUND`` the count begins again at 0, so
nobody can use them up.

A swarm of more than ``max_group_size`` stands in a grid (:mod:`manyhands.averaging.grid.seats`), where several groups
average in each round. A step is then several rounds, and begins at a multiple of their number. Whatever its groups
commit, a peer goes on to the next round, so all have one lineage there.

A peer that was expected and did not come is waited for only ``GRACE_S``, and leads nobody, until it says that it has
begun another step. One whose connection was lost is not waited for before a fresh record of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from manyhands.averaging.grid.seats import NO_SEAT, PublishedSeat, Seat, Step, first_seat, next_step
from manyhands.averaging.messages import MAX_ADDRESSES, Position, RoundManifest, readable_addresses
from manyhands.averaging.presence_record import (
    GOODBYE,
    LAST_ROUND,
    MAX_TTL_S,
    PRESENCE,
    PresenceRecord,
    first_position,
    grid_lineage,
    next_position,
    presence_key,
    rank_of,
)
from manyhands.averaging.sketch import disagreement_of
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ManifestMismatch, ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.dht import DhtNode, StoredValue
from manyhands.rpc import Endpoint
from manyhands.rpc.frames import readable
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

TTL_S = 30.0
KEEP_ALIVE_S = TTL_S / 3
MIN_PERIOD_S = 0.1
"""Between two records: what happens meanwhile is in the second one."""
GRACE_S = 1.0
"""From the begin of a step, for those who did not come the last time: they may have begun theirs in this moment."""
GOODBYE_TIMEOUT_S = 1.0
_GOODBYE = msgspec.msgpack.encode(GOODBYE)


class Seen(msgspec.Struct, frozen=True):
    """A record of another peer, which counts until ``expires_at`` (loop time)."""

    record: PresenceRecord
    sequence: int
    expires_at: float


class Missing(msgspec.Struct, frozen=True):
    """A peer that did not come: what was known of it then, and whether it was still connected."""

    num_steps: int
    sequence: int
    was_connected: bool


def _said_by(seen: Seen) -> PublishedSeat:
    return PublishedSeat(seen.record.position.step, seen.record.seat, seen.record.num_steps > 0)


class PresenceTracker:
    """This peer among those of the run; the :class:`manyhands.averaging.matchmaking.follower.Roster` of its rounds.

    Lives on the network thread.

    Args:
        tensors: fingerprint of this peer's list.
        summary: the list in words.
        max_group_size: larger swarms stand in a grid.

    Attributes:
        called: set when somebody begins a round here, or wants to join one.
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
        addresses = [str(address) for address in endpoint.addresses[:MAX_ADDRESSES]]
        self._own = PresenceRecord(first_position(run_id), tensors, summary, 0, endpoint.client_mode, addresses)
        self._seen: dict[PeerId, Seen] = {}
        self._sequences: dict[str, int] = {}  # by peer id
        self._missing: dict[PeerId, Missing] = {}
        self._grace_until = 0.0  # loop time
        self._max_group_size = max_group_size
        self._rng = rng
        self._step: Step | None = None  # in a grid
        self._version = 0  # of what the others have said
        self._mates: tuple[tuple[int, Position], list[PeerId]] | None = None  # as of that version, and position
        self.called = asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks = TaskOwner("presence")

    async def start(self) -> None:
        """Join those who average under the run id.

        Raises:
            ManifestMismatch: their tensors differ; it says whose, and how.
        """
        self._dht.declare(self._key, PRESENCE)
        await self.refresh()
        self._check_fits(is_published=False)
        leading, said = self.leading(), self._said()
        self._go_to(leading, first_seat(self._endpoint.peer_id, said, self._max_group_size, leading.step, self._rng))
        await self._publish()
        await self.refresh()
        try:
            self._check_fits(is_published=True)  # of two that begin at once, both see both
        except ManifestMismatch:
            await self._say_goodbye()
            raise
        self._tasks.spawn(self._publish_forever(), name="publishing")

    async def close(self) -> None:
        """Tell the others that this peer does not come any more."""
        await self._tasks.close()
        await self._say_goodbye()

    # the roster

    def position(self) -> Position:
        if self._step is None:
            return self._own.position
        return msgspec.structs.replace(self._own.position, group_key=self._step.key(self._own.position.step))

    def expected(self) -> Mapping[PeerId, bool]:
        """Who is at this position, or behind: it goes to this one when it steps. Says of each if it cannot lead."""
        is_grace = asyncio.get_running_loop().time() < self._grace_until
        expected = {}
        for peer_id, seen in self._nearby().items():
            if not self._is_missing(peer_id, seen):
                expected[peer_id] = seen.record.is_client
            elif is_grace and self._missing[peer_id].was_connected:
                expected[peer_id] = True
        return expected

    def _nearby(self) -> dict[PeerId, Seen]:
        """Those that belong in this peer's group."""
        step, position = self._step, self._own.position
        if step is None:
            own = rank_of(position)
            return {peer_id: seen for peer_id, seen in self._fitting().items() if rank_of(seen.record.position) <= own}
        basis = (self._version, position)
        if self._mates is None or self._mates[0] != basis:
            fitting = self._fitting().items()
            mates = [peer_id for peer_id, seen in fitting if step.is_mate(peer_id, _said_by(seen), position.step)]
            self._mates = (basis, mates)
        now = asyncio.get_running_loop().time()
        return {peer_id: self._seen[peer_id] for peer_id in self._mates[1] if self._seen[peer_id].expires_at > now}

    def is_known(self, peer_id: PeerId) -> bool:
        """Whether a peer has published where it is, with fitting tensors."""
        return peer_id in self._fitting()

    async def refresh(self) -> None:
        """Read the records of the others."""
        now = asyncio.get_running_loop().time()
        answer = await self._dht.get(self._key)
        for subkey, stored in answer.items():
            is_of_another = stored.owner == subkey != self._endpoint.peer_id
            if is_of_another and stored.sequence > self._sequences.get(subkey, -1):
                self._sequences[subkey] = stored.sequence
                self._version += 1
                self._take_in(PeerId(subkey), stored, now)
        if any(seen.expires_at <= now for seen in self._seen.values()):
            self._version += 1
            self._seen = {peer_id: seen for peer_id, seen in self._seen.items() if seen.expires_at > now}
        self._missing = {peer_id: missing for peer_id, missing in self._missing.items() if peer_id in self._seen}
        current = answer.keys() | self._seen.keys()
        self._sequences = {peer_id: number for peer_id, number in self._sequences.items() if peer_id in current}

    def report_missing(self, peer_id: PeerId) -> None:
        if (seen := self._seen.get(peer_id)) is not None:
            is_connected = self._endpoint.is_connected(peer_id)
            self._missing[peer_id] = Missing(seen.record.num_steps, seen.sequence, is_connected)

    def call_to_round(self) -> None:
        self.called.set()

    def recent_rounds(self) -> list[bytes]:
        return []  # there is no state that could part

    def is_stranger(self, peer_id: PeerId, recent_rounds: Sequence[bytes]) -> bool:
        return False

    def is_overruled(self) -> bool:
        return False

    # where this peer goes

    def begin_step(self) -> None:
        """This peer comes to the next step; go where the others are."""
        self._own = msgspec.structs.replace(self._own, num_steps=self._own.num_steps + 1)
        self._grace_until = asyncio.get_running_loop().time() + GRACE_S
        self._changed.set()
        self._take_seat()

    def _take_seat(self) -> None:
        """Choose this peer's place for the step that begins."""
        own, leading = self._own, self.leading()
        others = self._said()
        said = PublishedSeat(own.position.step, own.seat)
        step = next_step(self._endpoint.peer_id, said, others, self._max_group_size, leading.step, self._rng)
        if not step.layout.sides:
            self._step = None
            self._go_to(leading)
            return
        if step.end > LAST_ROUND:
            step = replace(step, first_round=0)
        if step.layout != own.seat.layout:
            logger.info("%d peers average in groups, laid out as %s", len(others) + 1, step.layout)
        self._step = step
        self._go_to(Position(step.first_round, grid_lineage(self._run_id)), Seat(step.layout, step.cell))

    def _said(self) -> dict[str, PublishedSeat]:
        """What the others have published of their places."""
        return {peer_id: _said_by(seen) for peer_id, seen in self._fitting().items()}

    def catch_up(self) -> None:
        """Go to the leading position, unless this peer stands in a grid: there a step begins at its own place."""
        if self._step is None:
            self._go_to(self.leading())

    def move(self, manifest: RoundManifest) -> None:
        """A round of this peer committed."""
        if self._step is None:
            self._go_to(next_position(self._own.position, manifest))

    @property
    def num_rounds(self) -> int:
        """Of the step."""
        return 1 if self._step is None else self._step.layout.num_rounds

    @property
    def num_rounds_left(self) -> int | None:
        """Of the step, in a grid; None if all are one group."""
        return None if self._step is None else self._step.end - self._own.position.step

    def next_round(self) -> None:
        """In a grid: a round is over for this peer, whether or not it committed."""
        assert self._step is not None
        number = min(self._own.position.step + 1, self._step.end)
        seat = Seat(self._step.layout, self._step.own_cell(number))
        self._go_to(Position(number, self._own.position.lineage), seat)

    def is_left_behind(self) -> bool:
        """Whether others are at a later round."""
        return self.leading().step > self._own.position.step

    def tell(self, sketch: bytes) -> None:
        """In a grid: these are some of the values that this peer holds after its step."""
        self._own = msgspec.structs.replace(self._own, sketch=sketch, sketch_round=self._own.position.step)
        self._changed.set()

    def disagreement(self) -> float | None:
        """How far apart the peers were after this peer's last step, as far as they have said."""
        own, fitting = self._own, self._fitting().values()
        others = [seen.record.sketch for seen in fitting if seen.record.sketch_round == own.sketch_round]
        return disagreement_of([own.sketch, *others])

    def leading(self) -> Position:
        """The highest position of those whose tensors fit."""
        positions = [seen.record.position for seen in self._fitting().values()]
        return max([self._own.position, *positions], key=rank_of)

    def is_ahead_of(self, peers: Iterable[PeerId]) -> bool:
        """Whether one of these peers is behind this one, as last read; peers that left or are missing do not count."""
        own, fitting = rank_of(self._own.position), self._fitting()
        return any(
            rank_of(seen.record.position) < own and not self._is_missing(peer_id, seen)
            for peer_id in peers
            if (seen := fitting.get(peer_id)) is not None
        )

    def num_peers(self) -> int:
        """Peers with fitting tensors, with this one, as last read."""
        return len(self._fitting()) + 1

    def misfits(self) -> list[str]:
        """What differs of those whose tensors do, one line each."""
        return [
            f"the tensors of peer {peer_id} differ: it has {readable(seen.record.summary)}; "
            f"here there are {self._own.summary}"
            for peer_id, seen in sorted(self._current().items())
            if seen.record.tensors != self._own.tensors
        ]

    def _go_to(self, position: Position, seat: Seat = NO_SEAT) -> None:
        if position != self._own.position:
            self._own = msgspec.structs.replace(self._own, position=position)
            self.called.clear()
            self._changed.set()
        if seat != self._own.seat:
            self._own = msgspec.structs.replace(self._own, seat=seat)
            self._changed.set()

    def _current(self) -> dict[PeerId, Seen]:
        now = asyncio.get_running_loop().time()
        return {peer_id: seen for peer_id, seen in self._seen.items() if seen.expires_at > now}

    def _fitting(self) -> dict[PeerId, Seen]:
        return {peer_id: seen for peer_id, seen in self._current().items() if seen.record.tensors == self._own.tensors}

    def _is_missing(self, peer_id: PeerId, seen: Seen) -> bool:
        missing = self._missing.get(peer_id)
        if missing is None:
            return False
        if missing.was_connected:
            return seen.record.num_steps == missing.num_steps
        return seen.sequence <= missing.sequence

    def _check_fits(self, *, is_published: bool) -> None:
        """The tensors that most peers have are the run's; of equally many, those of the lowest peer id."""
        owners: dict[bytes, list[PeerId]] = defaultdict(list)
        for peer_id, seen in self._current().items():
            owners[seen.record.tensors].append(peer_id)
        if not owners:
            return
        if is_published:
            owners[self._own.tensors].append(self._endpoint.peer_id)
        chosen = min(owners, key=lambda tensors: (-len(owners[tensors]), min(owners[tensors])))
        if chosen != self._own.tensors:
            raise ManifestMismatch(self._run_id, self.misfits()[:3])

    # records

    def _take_in(self, peer_id: PeerId, stored: StoredValue, now: float) -> None:
        known = self._seen.get(peer_id)
        if stored.raw == _GOODBYE:
            self._seen.pop(peer_id, None)
            return
        try:
            record: PresenceRecord = PRESENCE.decode(stored.raw)
        except msgspec.ValidationError as error:
            self._endpoint.counters["bad_records"] += 1
            logger.warning("the record of peer %s cannot be read: %s", peer_id, error)
            return
        self._seen[peer_id] = Seen(record, stored.sequence, now + min(stored.remaining_s, MAX_TTL_S))
        if known is None or known.record.addresses != record.addresses:
            self._endpoint.learn(peer_id, readable_addresses(record.addresses))

    async def _publish_forever(self) -> None:
        while True:
            waiting = asyncio.get_running_loop().create_task(self._changed.wait())
            try:
                await asyncio.wait([waiting], timeout=KEEP_ALIVE_S)
            finally:
                waiting.cancel()
            self._changed.clear()
            await self._publish()
            await asyncio.sleep(MIN_PERIOD_S)

    async def _publish(self) -> None:
        try:
            value = msgspec.to_builtins(self._own, builtin_types=(bytes,))
            await self._dht.store(self._key, value, TTL_S, subkey=self._endpoint.peer_id)
        except ManyhandsError as error:
            logger.warning("this peer's place was not published: %s", error)

    async def _say_goodbye(self) -> None:
        try:
            async with time_limit(GOODBYE_TIMEOUT_S, "saying goodbye to the run"):
                await self._dht.store(self._key, GOODBYE, TTL_S, subkey=self._endpoint.peer_id)
        except ManyhandsError as error:
            logger.debug("the others are not told that this peer left: %s", error)
