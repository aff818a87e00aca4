"""The presence of the averagers of a run: each one's current round, and in a large swarm its place in the grid.

Every peer publishes its record (:class:`manyhands.averaging.peer_records.PeerRecord`), and reads those of the others
when it steps. There is no state to load, so a position is only a meeting point. A peer that missed a round, or is new,
goes to the leading position: the highest (round number, lineage) that a peer with the same tensors has published. Two
parts of a split swarm find each other again by the same rule.

A peer may publish any round number, and the others then meet there: that changes no value. After ``LAST_ROUND`` the
count begins again at 0, so no peer can use the numbers up.

A swarm of more than ``max_group_size`` forms a grid (:mod:`manyhands.averaging.grid.seats`), where several groups
average in each round. A step is then several rounds, and begins at a multiple of their number. Whatever its groups
commit, a peer goes on to the next round, so all have one lineage there.

An expected peer that did not come is waited for only ``MOMENT_S`` and leads no group, until it publishes that it has
begun another step. A peer whose connection broke is not waited for before its next record.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from manyhands.averaging.attendees import Attendees
from manyhands.averaging.grid.seats import ONE_GROUP, Layout, Seat, Step, next_step
from manyhands.averaging.messages import Position, RoundManifest
from manyhands.averaging.peer_records import AVERAGING_KIND, GOODBYE, PEER_RECORD, PeerRecord, PeerRecords, peer_key
from manyhands.averaging.sketch import disagreement_of
from manyhands.averaging.timing import MOMENT_S, PUBLISH_S
from manyhands.base.errors import ManifestMismatch, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.run_id import is_run_id
from manyhands.dht import DhtNode
from manyhands.rpc import Endpoint
from manyhands.rpc.frames import readable
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

MAX_OTHER_RUNS = 8
"""Limit of the other runs that are looked at when a run id may be mistyped."""
LAST_ROUND = 2**48
"""The highest round number: 8,900 years of a thousand rounds a second."""


def first_position(run_id: str) -> Position:
    """The position at which the averagers of a run begin."""
    return Position(0, hashlib.sha256(f"averaging {run_id}".encode()).digest())


def next_position(position: Position, manifest: RoundManifest) -> Position:
    """The position after a committed round; after the last round number comes 0."""
    lineage = hashlib.sha256(position.lineage + manifest.fingerprint()).digest()
    return Position(position.step + 1 if position.step < LAST_ROUND else 0, lineage)


def order_of(position: Position) -> tuple[int, bytes]:
    """Orders positions: the higher one leads."""
    return (position.step, position.lineage)


class PresenceTracker(PeerRecords):
    """The positions of this averager and the others of its run.

    It is the :class:`manyhands.averaging.matchmaking.matchmaker.Meeting` of the rounds, and in a grid the
    :class:`manyhands.averaging.grid.step.GridPlace`.
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
        super().__init__(endpoint, dht, run_id, AVERAGING_KIND, PUBLISH_S)
        self.own = PeerRecord(first_position(run_id), endpoint.client_mode, [], tensors=tensors, summary=summary)
        # connected peers that did not come, with the number of steps that they had begun then
        self._absent: dict[PeerId, int] = {}
        self._grace_until = 0.0  # loop time
        self._max_group_size = max_group_size
        self._rng = rng
        self._step: Step | None = None  # only in a grid
        self.called = asyncio.Event()
        self._tasks = TaskOwner("presence")

    async def start(self) -> None:
        """Join the averagers of the run; raises ManifestMismatch if their tensors differ."""
        self._dht.declare(self._key, PEER_RECORD)
        await self.refresh()
        self._check_fits()
        self._go_to(self.leading())
        await self.publish()
        await self.refresh()
        self._tasks.spawn(self.publish_forever(), name="publishing")

    async def elsewhere(self) -> list[str]:
        """Run ids under which others average, and this peer does not; empty if others are in this run."""
        if self.observed():
            return []
        run_ids = sorted(filter(is_run_id, await self._dht.topics(AVERAGING_KIND)))[:MAX_OTHER_RUNS]
        try:
            found = await asyncio.gather(*(self._dht.get(peer_key(run_id, AVERAGING_KIND)) for run_id in run_ids))
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
        await self.say_goodbye()

    # the group

    def position(self) -> Position:
        if self._step is None:
            return self.own.position
        return msgspec.structs.replace(self.own.position, group_key=self._step.key(self.own.position.step))

    def expected(self) -> Mapping[PeerId, bool]:
        """The peers in this peer's group that are here or come here when they step; True for those that cannot lead."""
        is_grace = asyncio.get_running_loop().time() < self._grace_until
        step = self._step
        position = self.own.position
        missing = self.missing()
        expected = {}
        for peer_id, record in self._fitting().items():
            if step is None:
                is_here = order_of(record.position) <= order_of(position)
            else:
                is_here = step.is_mate(peer_id, record.seat, position.step)
            is_absent = self._is_absent(peer_id, record)
            if is_here and (is_grace if is_absent else peer_id not in missing):
                expected[peer_id] = record.is_client or is_absent
        return expected

    def attendees(self) -> Attendees:
        """The attendees of the next round, without a roster: an averager that came later does not know all rounds."""
        return Attendees.of(self._endpoint, self.position(), self.expected())

    def report_missing(self, peer_id: PeerId) -> None:
        super().report_missing(peer_id)
        observed = self.observed()
        self._absent = {other: number for other, number in self._absent.items() if other in observed}
        self._absent.pop(peer_id, None)
        if peer_id in observed and self._endpoint.is_connected(peer_id):
            self._absent[peer_id] = observed[peer_id].record.num_steps

    def call_to_round(self) -> None:
        self.called.set()

    # this peer's position

    def begin_step(self) -> None:
        """Begin this peer's next step at the leading position, and choose its place there."""
        self._update(num_steps=self.own.num_steps + 1)
        # peers that missed the last step may just have begun this one
        self._grace_until = asyncio.get_running_loop().time() + MOMENT_S
        own, leading = self.own, self.leading()
        others: dict[str, Seat] = {peer_id: record.seat for peer_id, record in self._fitting().items()}
        step = next_step(self._endpoint.peer_id, own.seat, others, self._max_group_size, leading.step, self._rng)
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
        self._go_to(Position(step.first_round, lineage), step.layout, step.cell)

    def catch_up(self) -> None:
        """Go to the leading position, unless this peer is in a grid, where a step begins at its own place."""
        if self._step is None:
            self._go_to(self.leading())

    def move(self, manifest: RoundManifest) -> None:
        """Go to the position after a committed round of this peer, unless it is in a grid."""
        if self._step is None:
            self._go_to(next_position(self.own.position, manifest))

    @property
    def num_rounds(self) -> int:
        return 1 if self._step is None else self._step.layout.num_rounds

    @property
    def num_rounds_left(self) -> int | None:
        return None if self._step is None else self._step.end - self.own.position.step

    def next_round(self) -> None:
        assert self._step is not None
        number = min(self.own.position.step + 1, self._step.end)
        self._go_to(Position(number, self.own.position.lineage), self._step.layout, self._step.own_cell(number))

    def is_left_behind(self) -> bool:
        return self.leading().step > self.own.position.step

    def tell(self, sketch: bytes) -> None:
        """In a grid: set the published sample of this peer's values after its step."""
        self._update(sketch=sketch, sketch_step=self.own.position.step)

    def disagreement(self) -> float | None:
        """The distance between the peers after this peer's last step, from the samples that they published."""
        own, fitting = self.own, self._fitting().values()
        others = [record.sketch for record in fitting if record.sketch_step == own.sketch_step]
        return disagreement_of([own.sketch, *others])

    def leading(self) -> Position:
        """The highest position of the peers whose tensors match."""
        positions = [record.position for record in self._fitting().values()]
        return max([self.own.position, *positions], key=order_of)

    def holders(self) -> tuple[Position, list[PeerId]]:
        """The highest position among the other peers that this one can ask, and the peers that are there."""
        positions = {
            peer_id: record.position
            for peer_id, record in self._fitting().items()
            if not record.is_client or self._endpoint.carries_bulk(peer_id)
        }
        leading = max(positions.values(), key=order_of, default=self.own.position)
        return leading, [peer_id for peer_id, position in positions.items() if position == leading]

    def is_ahead_of(self, peers: Iterable[PeerId]) -> bool:
        """Whether one of these peers is behind this one, as last read. Peers that left or are missing do not count."""
        own = order_of(self.own.position)
        fitting = self._fitting()
        missing = self.missing()
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
            f"here there are {self.own.summary}"
            for peer_id, seen in sorted(self.observed().items())
            if seen.record.tensors != self.own.tensors
        ]

    def _go_to(self, position: Position, layout: Layout = ONE_GROUP, cell: int = 0) -> None:
        seat = Seat(layout, cell, position.step)
        if position != self.own.position:
            self.called.clear()
        if (position, seat) != (self.own.position, self.own.seat):
            self._update(position=position, seat=seat)

    def _update(self, **changes: object) -> None:
        self._set_own(**changes)
        self.publish_soon()

    def _fitting(self) -> dict[PeerId, PeerRecord]:
        """The records of the peers whose tensors match."""
        tensors = self.own.tensors
        return {peer_id: record for peer_id, record in self.records().items() if record.tensors == tensors}

    def _is_absent(self, peer_id: PeerId, record: PeerRecord) -> bool:
        return self._absent.get(peer_id) == record.num_steps

    def _check_fits(self) -> None:
        """Check this peer's tensors against the most common ones; of equally common, those of the lowest peer id."""
        owners: dict[bytes, list[PeerId]] = defaultdict(list)
        for peer_id, seen in self.observed().items():
            owners[seen.record.tensors].append(peer_id)
        if owners and self.own.tensors != min(owners, key=lambda one: (-len(owners[one]), min(owners[one]))):
            raise ManifestMismatch(self._run_id, self.misfits()[:3])
