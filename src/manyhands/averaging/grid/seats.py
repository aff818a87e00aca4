"""The places of the peers in the grid of a large swarm, as far as one of them knows. Pure.

Each peer publishes its seat: its layout, and its cell there at its position. From that the others compute its cell at
any later round (:func:`manyhands.averaging.grid.layout.next_cell`), so they know which peers to expect.

At the beginning of a step a peer uses the layout that most peers name, unless this does not fit their number. Then all
peers that find so deal the cells of a new layout, in an order computed from what they know. If they know different
peers, some share a cell or wait for each other in vain in this step; before the next one they read what the others have
published. Of two peers in one cell the one with the higher id moves to a free one. A newcomer takes a free cell, too.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from manyhands.averaging.grid.layout import (
    MAX_CELLS,
    ONE_GROUP,
    Layout,
    agreed_layout,
    dealt_cells,
    free_cell,
    group_of,
    next_cell,
    next_layout,
    previous_cell,
)

MAX_ROUNDS_AGO = 64
"""Limit of the computation: a peer that was silent for more rounds takes a new cell."""


class Seat(msgspec.Struct, frozen=True):
    """A peer's place in a layout, as of a round number that is sent with it."""

    layout: Layout = ONE_GROUP
    cell: Annotated[int, msgspec.Meta(ge=0, lt=MAX_CELLS)] = 0

    def __post_init__(self) -> None:
        if self.cell >= self.layout.num_cells:
            raise ValueError(f"a grid of {self.layout} has no cell {self.cell}")


NO_SEAT = Seat()


@dataclass(frozen=True)
class PublishedSeat:
    """What another peer has published about its seat."""

    round_number: int
    seat: Seat


@dataclass(frozen=True)
class Step:
    """One step of a peer: its rounds are numbered from ``first_round`` on.

    Attributes:
        cell: of this peer at the first round.
        dealt: cells at the first round of peers that still have another layout, and must come to the same result.
    """

    first_round: int
    layout: Layout = ONE_GROUP
    cell: int = 0
    dealt: Mapping[str, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The first round of the next step."""
        return self.first_round + self.layout.num_rounds

    def own_cell(self, round_number: int) -> int:
        """This peer's cell at a round of the step, or at its end."""
        return _moved(self.layout, self.cell, self.first_round, round_number)

    def key(self, round_number: int) -> str:
        """Names this peer's group in a round."""
        return _key(self.layout, self.own_cell(round_number), round_number)

    def is_mate(self, peer_id: str, said: PublishedSeat, round_number: int) -> bool:
        """Whether another peer should be in this peer's group in a round."""
        cell = self._cell_of(peer_id, said, round_number)
        return cell is not None and _key(self.layout, cell, round_number) == self.key(round_number)

    def _cell_of(self, peer_id: str, said: PublishedSeat, round_number: int) -> int | None:
        """Another peer's cell at a round, if it takes part in the step."""
        if said.round_number > round_number:
            return None
        if said.round_number >= self.first_round and said.seat.layout == self.layout:
            return _moved(self.layout, said.seat.cell, said.round_number, round_number)
        if said.round_number > self.first_round:
            return None
        cell = self.dealt.get(peer_id)
        if said.seat.layout.sides == self.layout.sides:
            cell = cell_at(said, self.first_round)
        return None if cell is None else _moved(self.layout, cell, self.first_round, round_number)


def next_step(
    own_id: str,
    own: PublishedSeat,
    others: Mapping[str, PublishedSeat],
    max_group_size: int,
    leading_round: int,
    rng: random.Random,
) -> Step:
    """The next step of a peer, from what it knows.

    Args:
        others: the other peers that are alive.
        leading_round: the highest round number of all.
    """
    named, layout = chosen_layouts(own, others, max_group_size)
    num_rounds = layout.num_rounds
    first_round = leading_round - leading_round % num_rounds  # of the step that others may have begun just now
    if first_round < own.round_number:
        first_round = -(-own.round_number // num_rounds) * num_rounds
    return step_from(own_id, own, others, named, layout, first_round, rng)


def chosen_layouts(
    own: PublishedSeat, others: Mapping[str, PublishedSeat], max_group_size: int
) -> tuple[Layout, Layout]:
    """The layout that most peers name, and the one that fits their number."""
    named = agreed_layout([own.seat.layout, *(said.seat.layout for said in others.values())])
    return named, next_layout(named, len(others) + 1, max_group_size)


def step_from(
    own_id: str,
    own: PublishedSeat,
    others: Mapping[str, PublishedSeat],
    named: Layout,
    layout: Layout,
    first_round: int,
    rng: random.Random,
) -> Step:
    """The step that begins at a round in a layout; ``named`` is the one that most peers have so far."""
    if not layout.sides:
        return Step(first_round)
    if layout.sides != named.sides and own.seat.layout.sides != layout.sides:
        dealt = dealt_cells(layout, [own_id, *others], first_round)
        return Step(first_round, layout, dealt.pop(own_id), dealt)
    cell = cell_at(own, first_round) if own.seat.layout.sides == layout.sides else None
    taken = {
        peer_id: place
        for peer_id, said in others.items()
        if said.seat.layout.sides == layout.sides and (place := cell_at(said, first_round)) is not None
    }
    is_new = cell is None
    if cell is None:  # as dealt for this peer by those that laid the grid out a moment ago
        cell = dealt_cells(layout, [own_id, *others], first_round)[own_id]
    if any(place == cell and (is_new or peer_id < own_id) for peer_id, place in taken.items()):
        cell = free_cell(layout, set(taken.values()), rng)
    return Step(first_round, layout, cell)


def cell_at(said: PublishedSeat, round_number: int) -> int | None:
    """A peer's cell at a later or earlier round, if it can be computed."""
    if abs(round_number - said.round_number) > MAX_ROUNDS_AGO:
        return None
    return _moved(said.seat.layout, said.seat.cell, said.round_number, round_number)


@functools.lru_cache(maxsize=8192)  # of each peer, at each look; its record stays for many looks
def _moved(layout: Layout, cell: int, since: int, until: int) -> int:
    for number in range(since, until):
        cell = next_cell(layout, cell, number)
    for number in range(since - 1, until - 1, -1):
        cell = previous_cell(layout, cell, number)
    return cell


def _key(layout: Layout, cell: int, round_number: int) -> str:
    return f"{layout} {group_of(layout, cell, round_number)}"
