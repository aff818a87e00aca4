"""Decides in which group this peer averages, and whom it expects there: in one group, or in a grid in a large run.

In a grid, a global step has one round along each axis (:mod:`manyhands.averaging.grid.seats`). Rounds are numbered
consecutively: step s in a grid of d axes has the rounds s x d to s x d + d - 1. So the step and a peer's seat, which it
publishes with its progress, determine its group.

A run becomes a grid after a step that more than ``max_group_size`` peers made together in one group, as all of them
know from the round's manifest. The number of records does not count, as any peer can publish a thousand of them
(docs/adr/0022-counting-peers.md).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from manyhands.averaging.attendees import Attendees
from manyhands.averaging.grid.seats import (
    MAX_ROUNDS_AGO,
    NO_SEAT,
    Seat,
    Step,
    cell_at,
    chosen_layouts,
    step_from,
)
from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.roster import Roster
from manyhands.base.identity import PeerId
from manyhands.optim.run.tracker import ProgressTracker
from manyhands.rpc import Endpoint


@dataclass(eq=False)
class GridAssignment:
    """The groups of one peer's global steps. Lives on the network thread.

    It is the :class:`manyhands.averaging.matchmaking.matchmaker.Meeting` of the run's rounds, and in a step the
    :class:`manyhands.averaging.grid.step.GridPlace`.

    Args:
        max_group_size: the largest number of peers in one group; larger runs form a grid.

    Attributes:
        is_settled: whether all peers here have seats, and no two of them the same, by the records read so far; True in
            one group.
        called: set when another peer has begun the next round of this peer.
    """

    tracker: ProgressTracker
    endpoint: Endpoint
    max_group_size: int
    rng: random.Random
    is_settled: bool = field(default=True, init=False)
    called: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _step: Step | None = field(default=None, init=False)
    # the version of the records and the position that the plan was made from
    _basis: tuple[int, Position] | None = field(default=None, init=False)
    _number: int = field(default=0, init=False)  # of the next round
    _stepping_from: Position | None = field(default=None, init=False)  # set while a step in a grid is made
    _num_left: int = field(default=0, init=False)  # rounds of that step

    def __post_init__(self) -> None:
        self.report_missing = self.tracker.report_missing

    # the next round

    def position(self) -> Position:
        """The position of this peer's next round; in a grid it has the round's number as its step, and the group."""
        step, here = self._step, self.tracker.own.position
        return here if step is None else Position(self._number, here.lineage, step.key(self._number))

    def attendees(self) -> Attendees:
        return Attendees.of(self.endpoint, self.position(), self.expected(), self.roster(), self.batch_s())

    def expected(self) -> Mapping[PeerId, bool]:
        """The other peers that should come to the next round, and whether each is in client mode.

        Auxiliary peers come only if there is one group.
        """
        step, expected = self._step, self.tracker.view.expected
        if step is None:
            return expected
        observed = self.tracker.observed()
        return {
            peer_id: is_client for peer_id, is_client in expected.items()
            if step.is_mate(peer_id, observed[peer_id].record.seat, self._number)
        }  # fmt: skip

    def roster(self) -> Roster | None:
        """The roster of the run at this peer's position; None in a grid."""
        return self.tracker.roster() if self._step is None else None

    def batch_s(self) -> float:
        """The median time for a batch of the roster's voters here and this peer, in seconds; 0 if unknown.

        Without voters, it is that of all trainers here.
        """
        roster, awaited = self.roster(), self.tracker.view.awaited
        voters = roster.voters if roster is not None else frozenset()
        records = [seen.record for peer_id, seen in awaited.items() if not voters or peer_id in voters]
        times_s = sorted(record.batch_s for record in (self.tracker.own, *records) if record.batch_s > 0)
        return times_s[len(times_s) // 2] if times_s else 0.0

    def call_to_round(self) -> None:
        """Take in that another peer has begun the next round."""
        self.called.set()
        if self._stepping_from is None:  # else it is a round within the step that is being made
            self.tracker.call_to_round()

    # a step

    def begin_step(self) -> bool:
        """Fix the groups of the step that begins; returns whether it is made in a grid."""
        self._stepping_from = None
        self.plan()
        if self._step is None:
            return False
        self._stepping_from = self.tracker.own.position
        self._num_left = self._step.layout.num_rounds
        self.called.clear()
        return True

    def end_step(self) -> None:
        """End the step, whether it was made or failed; after a failure the next attempt begins with the first round."""
        self._stepping_from = self._basis = None
        self.plan()

    @property
    def num_rounds(self) -> int:
        return 1 if self._step is None else self._step.layout.num_rounds

    @property
    def num_rounds_left(self) -> int | None:
        """Number of rounds left in the step that is being made; None outside a step, or if all are one group."""
        return None if self._stepping_from is None else self._num_left

    def next_round(self) -> None:
        """Go on to the next round of the step; after the last one the number stays until the step has ended."""
        if self._num_left > 1:
            self._number += 1
            self.called.clear()
        self._num_left = max(self._num_left - 1, 0)

    def is_left_behind(self) -> bool:
        """Whether a better branch is at a higher step than this peer."""
        return self.tracker.leading_branch().position.step > self.tracker.own.position.step

    # places of the peers

    def plan(self) -> None:
        """Plan the groups of the next step from the records read so far, and take a seat in them.

        Call this whenever records of the others have changed. A step that has begun keeps its groups.
        """
        here = self.tracker.own.position
        basis = (self.tracker.version, here)
        if self._stepping_from == here or basis == self._basis:
            return
        self._basis, self._stepping_from = basis, None
        at_here = self.tracker.view.trainers
        self._step = self._step_among(here, {peer_id: seen.record for peer_id, seen in at_here.items()})
        if self._step is not None:
            self._number = self._step.first_round

    def _step_among(self, here: Position, records: Mapping[PeerId, PeerRecord]) -> Step | None:
        own = self.tracker.own.seat
        if not own.layout.sides and not self._begins_grid(records):
            self.is_settled = True
            return None
        others: dict[str, Seat] = {peer_id: record.seat for peer_id, record in records.items()}
        named, layout = chosen_layouts(own, others, self.max_group_size)
        if not layout.sides:
            self.tracker.sit(NO_SEAT)
            return None
        first_round = here.step * layout.num_rounds
        seated = [said for said in (own, *others.values()) if said.layout.sides == layout.sides]
        self.is_settled = len({cell_at(said, first_round) for said in seated}) == len(records) + 1
        step = step_from(self.endpoint.peer_id, own, others, named, layout, first_round, self.rng)
        is_old = first_round - own.round_number > MAX_ROUNDS_AGO // 2
        if is_old or own.layout != layout or cell_at(own, first_round) != step.cell:
            self.tracker.sit(Seat(layout, step.cell, first_round))  # the published seat does not lead to this cell
        return step

    def _begins_grid(self, records: Mapping[PeerId, PeerRecord]) -> bool:
        """Whether the next step is made in a grid, for a peer that has no seat yet.

        Args:
            records: of the other trainers here.
        """
        if self.tracker.num_together:
            return self.tracker.num_together > self.max_group_size
        # this peer has loaded a state, or made its last step alone: the others know more
        of_teachers = [record for peer_id, record in records.items() if self.tracker.has_learnt_from(peer_id)]
        if any(record.seat.layout.sides for record in of_teachers or records.values()):
            return True
        observed = self.tracker.observed().values()
        return len(records) >= self.max_group_size and not any(seen.record.sketch for seen in observed)
