"""Determines which peers of a large swarm average together, round by round. Pure.

Up to ``max_group_size`` peers are one group. A larger swarm forms a grid with a cell for each peer. A step has d
rounds, one along each of the grid's d axes: peers whose coordinates differ only along the axis of the round are a
group. If all cells are taken and no peer fails, all hold the mean of all after d rounds. The members of a group differ
in one coordinate, so each brings the group's result to another group of the next round.

After each round every group gets new coordinates along its axis: the old ones, shifted by an amount drawn from the
round number and the group. So coordinates stay distinct, and groups change. All peers can compute all later positions
from the cell that each peer has published once: no further messages are needed.

While at most half of the cells are taken, the rows of a grid are too short, and groups drawn at random from all cells
mix faster; see ``benchmarks/mixing_sim.py``.

Source: Ryabinin et al., Moshpit SGD, arXiv:2103.03239, where the leader of each group deals the new coordinates.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Annotated

import msgspec

MAX_AXES = 16
MAX_SIDE = 4096
MAX_CELLS = 2**20
SHRINK_BELOW = 0.25
"""Share of the cells taken below which a new grid is made."""
RANDOM_UP_TO = 0.5
"""Share of the cells taken up to which groups are drawn at random."""
GRID_ABOVE = 0.625
"""Share of the cells taken above which groups are rows again; between the two they stay as they are."""
ONE_GROUP_UP_TO = 0.75
"""Share of ``max_group_size`` below which a grid becomes one group; above 1 one group becomes a grid."""


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
        """The number of random groups: half of the cells then give groups as large as rows."""
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


def next_cell(layout: Layout, cell: int, round_number: int) -> int:
    """The cell of a peer after a round, whether or not its group has committed."""
    return _shifted(layout, cell, round_number, 1)


def previous_cell(layout: Layout, cell: int, round_number: int) -> int:
    """The cell before a round of a peer that is in ``cell`` after it."""
    return _shifted(layout, cell, round_number, -1)


def _shifted(layout: Layout, cell: int, round_number: int, times: int) -> int:
    if not layout.sides or layout.is_random:
        return cell
    stride, side = _axis(layout.sides, round_number)
    coordinate = cell // stride % side
    row = cell - coordinate * stride
    return row + (coordinate + times * _shift(side, row, round_number)) % side * stride


def layout_for(num_peers: int, max_group_size: int) -> Layout:
    """The smallest layout with a cell for each peer: as few rounds as possible, and rows of similar length.

    Args:
        max_group_size: at least 2.
    """
    if num_peers <= max_group_size:
        return ONE_GROUP
    num_peers = min(num_peers, MAX_CELLS)
    num_axes = 2
    while max_group_size**num_axes < num_peers:
        num_axes += 1
    side = max(2, math.floor(num_peers ** (1 / num_axes)))
    sides = [side] * num_axes
    while math.prod(sides) > num_peers and side > 2:  # the root was rounded up
        side -= 1
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
    is_too_long = max(current.sides) > max_group_size
    if taken > 1 or taken < SHRINK_BELOW or is_too_long:
        return layout_for(num_peers, max_group_size)
    if taken <= RANDOM_UP_TO or taken > GRID_ABOVE:
        return Layout(current.sides, taken <= RANDOM_UP_TO)
    return current


def agreed_layout(named: Iterable[Layout]) -> Layout:
    """The layout named most often; of equally many, the larger one."""
    votes = Counter(named)
    return max(votes, key=lambda layout: (votes[layout], layout.num_cells, layout.sides, layout.is_random))


def dealt_cells(layout: Layout, peers: Collection[str], round_number: int) -> dict[str, int]:
    """A cell for each of the peers that lay out a new grid together; distinct as long as there are enough.

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
