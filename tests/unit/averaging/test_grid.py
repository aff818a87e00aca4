"""The assignment of peers to groups: what must hold for every number of peers and every grid."""

from __future__ import annotations

import random
from collections import defaultdict
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.grid.seats import (
    MAX_CELLS,
    ONE_GROUP,
    Layout,
    agreed_layout,
    dealt_cells,
    free_cell,
    group_of,
    layout_for,
    next_cell,
    next_layout,
)

sides = st.lists(st.integers(2, 6), min_size=1, max_size=4).map(tuple)
grids = st.builds(Layout, sides)
layouts = st.one_of(grids, st.builds(Layout, sides, st.just(True)), st.just(ONE_GROUP))
round_numbers = st.integers(0, 2**48)


def groups_in(layout: Layout, cells: list[int], round_number: int) -> list[list[int]]:
    """Indices of the cells, by group."""
    groups = defaultdict(list)
    for index, cell in enumerate(cells):
        groups[group_of(layout, cell, round_number)].append(index)
    return list(groups.values())


@given(grids, round_numbers)
def test_a_full_grid_holds_the_mean_of_all_after_one_round_along_each_axis(layout: Layout, step: int) -> None:
    cells = list(range(layout.num_cells))
    values = [Fraction(7**cell % 1000) for cell in cells]
    mean = sum(values) / len(values)
    for number in range(step * layout.num_rounds, (step + 1) * layout.num_rounds):
        for members in groups_in(layout, cells, number):
            average = sum(values[index] for index in members) / len(members)
            for index in members:
                values[index] = average
        cells = [next_cell(layout, cell, number) for cell in cells]
    assert set(values) == {mean}


@given(grids, round_numbers)
def test_new_coordinates_are_distinct_in_each_group(layout: Layout, number: int) -> None:
    cells = list(range(layout.num_cells))
    moved = [next_cell(layout, cell, number) for cell in cells]
    assert sorted(moved) == cells, "each cell has one peer"
    assert [next_cell(layout, cell, number, times=-1) for cell in moved] == cells
    for members in groups_in(layout, cells, number):
        assert len({group_of(layout, moved[index], number) for index in members}) == 1, "along this axis only"
        if layout.num_rounds > 1:
            assert len({group_of(layout, moved[index], number + 1) for index in members}) == len(members)


@given(layouts, round_numbers)
def test_groups_are_no_longer_than_the_longest_side(layout: Layout, number: int) -> None:
    cells = list(range(layout.num_cells))
    longest = max(len(members) for members in groups_in(layout, cells, number))
    sides = layout.sides or (1,)
    if layout.is_random:
        assert longest <= -(-layout.num_cells // layout.num_random_groups), "even if all cells are taken"
    else:
        assert longest == sides[number % len(sides)]


@given(st.integers(1, 5000), st.integers(2, 256))
def test_a_layout_has_a_cell_for_everybody_and_is_not_half_empty(num_peers: int, max_group_size: int) -> None:
    layout = layout_for(num_peers, max_group_size)
    assert (layout == ONE_GROUP) == (num_peers <= max_group_size)
    if layout.sides:
        assert num_peers <= layout.num_cells
        assert max(layout.sides) <= max_group_size
        assert max(layout.sides) - min(layout.sides) <= 1
        assert max_group_size ** (layout.num_rounds - 1) < num_peers or layout.num_rounds == 2, (
            "no more rounds than it takes"
        )
        assert 2 * num_peers > layout.num_cells
        assert next_layout(layout, num_peers, max_group_size).sides in (layout.sides, ())


@given(layouts, st.integers(1, 3000), st.integers(2, 64))
def test_the_next_layout_fits_and_then_stays(layout: Layout, num_peers: int, max_group_size: int) -> None:
    after = next_layout(layout, num_peers, max_group_size)
    assert num_peers <= (after.num_cells if after.sides else max_group_size)
    assert max(after.sides, default=2) <= max_group_size
    assert next_layout(after, num_peers, max_group_size) == after


def test_a_layout_stays_while_a_few_come_and_go() -> None:
    grid = layout_for(1024, 256)
    assert grid == Layout((32, 32))
    assert next_layout(grid, 1025, 256).num_cells >= 1025
    assert next_layout(grid, 520, 256) == grid
    half = next_layout(grid, 512, 256)
    assert half == Layout((32, 32), is_random=True)
    assert next_layout(half, 640, 256) == half, "for as long as that is not much more than half"
    assert next_layout(half, 641, 256) == grid
    assert next_layout(half, 257, 256) == half
    assert next_layout(half, 255, 256) == ONE_GROUP
    assert next_layout(half, 192, 256) == ONE_GROUP
    assert next_layout(ONE_GROUP, 256, 256) == ONE_GROUP
    assert next_layout(ONE_GROUP, 257, 256).sides == (17, 16)


@given(grids, st.integers(0, 40), round_numbers)
def test_all_peers_that_know_the_same_peers_deal_the_same_distinct_cells(
    layout: Layout, num_peers: int, number: int
) -> None:
    peers = [f"peer {index}" for index in range(num_peers)]
    cells = dealt_cells(layout, peers, number)
    assert cells == dealt_cells(layout, peers[::-1], number)
    assert set(cells) == set(peers)
    assert len(set(cells.values())) == min(num_peers, layout.num_cells)
    assert all(0 <= cell < layout.num_cells for cell in cells.values())


@given(grids, st.data())
def test_a_newcomer_takes_a_cell_that_nobody_has(layout: Layout, data: st.DataObject) -> None:
    taken = data.draw(st.sets(st.integers(0, layout.num_cells - 1)))
    cell = free_cell(layout, taken, random.Random(data.draw(st.integers(0, 99))))
    assert 0 <= cell < layout.num_cells
    assert cell not in taken or len(taken) == layout.num_cells


def test_the_layout_is_what_most_peers_say_and_the_larger_one_in_a_tie() -> None:
    small, large = Layout((4, 4)), Layout((5, 4))
    assert agreed_layout([small, small, large]) == small
    assert agreed_layout([small, large]) == agreed_layout([large, small]) == large
    assert agreed_layout([ONE_GROUP, large]) == large


@pytest.mark.parametrize("sides", [(1,), (4097,), (2,) * 17, (4096, 4096), (0, 3), (-2, -2)])
def test_grids_that_make_no_sense_are_not_decoded(sides: tuple[int, ...]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"sides": sides}), type=Layout)


def test_the_layout_for_very_many_peers_has_the_largest_grid() -> None:
    assert layout_for(10**7, 4096).num_cells >= MAX_CELLS
    assert str(Layout((32, 31))) == "32x31"
    assert str(Layout((32, 31), is_random=True)) == "random 32x31"
    assert str(ONE_GROUP) == "one group"
