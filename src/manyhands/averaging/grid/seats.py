"""Computes which peers of a large swarm average together, round by round, from what one of them knows. Pure.

Up to ``max_group_size`` peers are one group. A larger swarm forms a grid with a cell for each peer. A step has d
rounds, one along each of the grid's d axes: peers whose coordinates differ only along the axis of the round are a
group. If all cells are taken and no peer fails, all hold the mean of all after d rounds. The members of a group differ
in one coordinate, so each brings the group's result to another group of the next round.

After each round every group gets new coordinates along its axis: the old ones, shifted by an amount drawn from the
round number and the group. So coordinates stay distinct, and groups change.

While at most half of the cells are taken, the rows of a grid are too short, and groups drawn at random from all cells
mix faster; see ``benchmarks/mixing_sim.py``.

Each peer publishes its seat: its layout, and its cell there at a round. From that the others compute its cell at any
later round, so they know which peers to expect: no further messages are needed.

At the beginning of a step a peer uses the layout that most peers name, unless this does not fit their number. Then all
peers deal the cells of a new layout, in an order computed from what they know. If they know different peers, some share
a cell or wait for each other in vain in this step. Of two peers in one cell the one with the higher id moves to a free
one. A newcomer takes a free cell, too.

Source: Ryabinin et al., Moshpit SGD, arXiv:2103.03239, where the leader of each group deals the new coordinates.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

MAX_AXES = 16
MAX_SIDE = 4096
MAX_CELLS = 2**20
SHRINK_BELOW = 0.25
"""If less than this share of the cells is taken, a new grid is made."""
RANDOM_UP_TO = 0.5
"""If at most this share of the cells is taken, groups are drawn at random."""
GRID_ABOVE = 0.625
"""If more than this share of the cells is taken, groups are rows again; between the shares they stay as they are."""
ONE_GROUP_UP_TO = 0.75
"""A grid becomes one group if it has at most ``max_group_size`` peers times this share."""
MAX_ROUNDS_AGO = 64
"""A peer's cell in another round is computed from its seat if the two rounds are at most this far apart. A
peer with an older seat takes a new cell."""


class Layout(msgspec.Struct, frozen=True):
    """Maps the cells of a swarm's peers to groups; without sides all are one group.

    Attributes:
        sides: number of cells along each axis.
        is_random: groups are drawn at random instead of being rows.
    """

    sides: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=2, le=MAX_SIDE)], ...], msgspec.Meta(max_length=MAX_AXES)
    ] = ()
    is_random: bool = False

    def __post_init__(self) -> None:
        if self.num_cells > MAX_CELLS:
            raise ValueError(f"a grid has up to {MAX_CELLS} cells")

    @property
    def num_cells(self) -> int:
        return math.prod(self.sides)

    @property
    def num_rounds(self) -> int:
        """Rounds of one step."""
        return max(1, len(self.sides))

    @property
    def num_random_groups(self) -> int:
        """Number of groups if they are drawn at random: with half of the cells taken, each is as large as a row."""
        return max(1, self.num_cells // (2 * max(self.sides)))

    def __str__(self) -> str:
        name = "x".join(str(side) for side in self.sides)
        return f"random {name}" if self.is_random else name or "one group"


ONE_GROUP = Layout()


def group_of(layout: Layout, cell: int, round_number: int) -> int:
    """The group of a cell in a round; two cells average together if theirs are equal."""
    if not layout.sides:
        return 0
    if layout.is_random:
        return _shuffled(layout.num_cells, round_number)[cell] % layout.num_random_groups
    stride, side = _axis(layout.sides, round_number)
    return cell - cell // stride % side * stride


def next_cell(layout: Layout, cell: int, round_number: int, times: int = 1) -> int:
    """The cell of a peer after a round, whether or not its group has committed; with ``times=-1`` the way back."""
    if not layout.sides or layout.is_random:
        return cell
    stride, side = _axis(layout.sides, round_number)
    coordinate = cell // stride % side
    row = cell - coordinate * stride
    return row + (coordinate + times * _shift(side, row, round_number)) % side * stride


def layout_for(num_peers: int, max_group_size: int) -> Layout:
    """The smallest layout with a cell for each peer: as few rounds as possible, and rows of similar length."""
    if num_peers <= max_group_size:
        return ONE_GROUP
    num_peers = min(num_peers, MAX_CELLS)
    num_axes = 2
    while max_group_size**num_axes < num_peers:
        num_axes += 1
    side = max(2, math.floor(num_peers ** (1 / num_axes)))
    sides = [side] * num_axes
    for axis in range(num_axes):
        while math.prod(sides) < num_peers and sides[axis] == side:
            sides[axis] += 1
    return Layout(tuple(sides))


def next_layout(current: Layout, num_peers: int, max_group_size: int) -> Layout:
    """The layout of the next step: the current one as long as it fits the number of peers alive."""
    if not current.sides:
        return layout_for(num_peers, max_group_size)
    if num_peers <= ONE_GROUP_UP_TO * max_group_size:
        return ONE_GROUP
    taken = num_peers / current.num_cells
    if not SHRINK_BELOW <= taken <= 1 or max(current.sides) > max_group_size:
        return layout_for(num_peers, max_group_size)
    if taken <= RANDOM_UP_TO or taken > GRID_ABOVE:
        return Layout(current.sides, taken <= RANDOM_UP_TO)
    return current


def agreed_layout(named: Iterable[Layout]) -> Layout:
    """The layout named most often; of equally many, the larger one."""
    votes = Counter(named)
    return max(votes, key=lambda layout: (votes[layout], layout.num_cells, layout.sides, layout.is_random))


def dealt_cells(layout: Layout, peers: Collection[str], round_number: int) -> dict[str, int]:
    """A cell for each of the peers that lay out a new grid together; distinct if there are enough cells.

    The same set of peers gives the same cells.
    """
    seed = f"{layout} {round_number} "
    order = sorted(peers, key=lambda peer: hashlib.sha256((seed + peer).encode()).digest())
    cells = _shuffled(layout.num_cells, round_number)
    return {peer: cells[rank % layout.num_cells] for rank, peer in enumerate(order)}


def free_cell(layout: Layout, taken: Collection[int], rng: random.Random) -> int:
    """A cell for a newcomer: a free one, or any if none is free."""
    free = sorted(set(range(layout.num_cells)) - set(taken))
    return rng.choice(free) if free else rng.randrange(layout.num_cells)


def _axis(sides: tuple[int, ...], round_number: int) -> tuple[int, int]:
    """Distance between neighbours along the axis of a round, and their number."""
    axis = round_number % len(sides)
    return math.prod(sides[axis + 1 :]), sides[axis]


@functools.lru_cache(maxsize=8192)
def _shift(side: int, row: int, round_number: int) -> int:
    digest = hashlib.sha256(f"shift of row {row} after round {round_number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % side


@functools.lru_cache(maxsize=8)
def _shuffled(num_cells: int, round_number: int) -> list[int]:
    """The numbers below ``num_cells`` in an order drawn from the round number."""

    def drawn(number: int) -> bytes:
        return hashlib.sha256(f"{round_number} {number}".encode()).digest()

    return sorted(range(num_cells), key=drawn)


class Seat(msgspec.Struct, frozen=True):
    """A peer's place in a layout, as of a round."""

    layout: Layout = ONE_GROUP
    cell: Annotated[int, msgspec.Meta(ge=0, lt=MAX_CELLS)] = 0
    round_number: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0

    def __post_init__(self) -> None:
        if self.cell >= self.layout.num_cells:
            raise ValueError(f"a grid of {self.layout} has no cell {self.cell}")


NO_SEAT = Seat()


@dataclass(frozen=True)
class Step:
    """One step of a peer: its rounds are numbered from ``first_round`` on.

    Attributes:
        cell: this peer's cell at the first round.
        dealt: cells at the first round, for peers whose records still name another layout; they compute the same.
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

    def is_mate(self, peer_id: str, said: Seat, round_number: int) -> bool:
        """Whether another peer should be in this peer's group in a round."""
        cell = self._cell_of(peer_id, said, round_number)
        return cell is not None and _key(self.layout, cell, round_number) == self.key(round_number)

    def _cell_of(self, peer_id: str, said: Seat, round_number: int) -> int | None:
        """Another peer's cell at a round, if it takes part in the step."""
        if said.round_number > round_number:
            return None
        if said.round_number >= self.first_round and said.layout == self.layout:
            return _moved(self.layout, said.cell, said.round_number, round_number)
        if said.round_number > self.first_round:
            return None
        cell = self.dealt.get(peer_id)
        if said.layout.sides == self.layout.sides:
            cell = cell_at(said, self.first_round)
        return None if cell is None else _moved(self.layout, cell, self.first_round, round_number)


def next_step(
    own_id: str,
    own: Seat,
    others: Mapping[str, Seat],
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
    first_round = leading_round - leading_round % num_rounds  # others may have begun its step just now
    if first_round < own.round_number:
        first_round = -(-own.round_number // num_rounds) * num_rounds
    return step_from(own_id, own, others, named, layout, first_round, rng)


def chosen_layouts(own: Seat, others: Mapping[str, Seat], max_group_size: int) -> tuple[Layout, Layout]:
    """The layout that most peers name, and the one that fits their number."""
    named = agreed_layout([own.layout, *(said.layout for said in others.values())])
    return named, next_layout(named, len(others) + 1, max_group_size)


def step_from(
    own_id: str,
    own: Seat,
    others: Mapping[str, Seat],
    named: Layout,
    layout: Layout,
    first_round: int,
    rng: random.Random,
) -> Step:
    """The step that begins at a round in a layout; ``named`` is the one that most peers have so far."""
    if not layout.sides:
        return Step(first_round)
    if layout.sides != named.sides and own.layout.sides != layout.sides:
        dealt = dealt_cells(layout, [own_id, *others], first_round)
        return Step(first_round, layout, dealt.pop(own_id), dealt)
    cell = cell_at(own, first_round) if own.layout.sides == layout.sides else None
    taken = {
        peer_id: place
        for peer_id, said in others.items()
        if said.layout.sides == layout.sides and (place := cell_at(said, first_round)) is not None
    }
    is_new = cell is None
    if cell is None:  # the cell that those who laid the grid out a moment ago have dealt to this peer
        cell = dealt_cells(layout, [own_id, *others], first_round)[own_id]
    if any(place == cell and (is_new or peer_id < own_id) for peer_id, place in taken.items()):
        cell = free_cell(layout, set(taken.values()), rng)
    return Step(first_round, layout, cell)


def cell_at(said: Seat, round_number: int) -> int | None:
    """A peer's cell at a later or earlier round, if it can be computed."""
    if abs(round_number - said.round_number) > MAX_ROUNDS_AGO:
        return None
    return _moved(said.layout, said.cell, said.round_number, round_number)


@functools.lru_cache(maxsize=8192)  # asked for each peer at each look; its seat stays for many looks
def _moved(layout: Layout, cell: int, since: int, until: int) -> int:
    for number in range(since, until):
        cell = next_cell(layout, cell, number)
    for number in range(since - 1, until - 1, -1):
        cell = next_cell(layout, cell, number, times=-1)
    return cell


def _key(layout: Layout, cell: int, round_number: int) -> str:
    return f"{layout} {group_of(layout, cell, round_number)}"
