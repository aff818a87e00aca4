"""Where a peer of a large run sits, against a DHT whose answers the test writes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from manyhands.averaging.grid.layout import Layout
from manyhands.averaging.grid.seats import MAX_ROUNDS_AGO, NO_SEAT, Seat
from manyhands.base.identity import PeerId
from manyhands.optim.run.grid_assignment import GridAssignment
from tests.swarm import identity_of
from tests.unit.optim.test_tracker import HERE, NEXT, Run, run_of_one

GRID = Layout((2, 2))
OTHERS = sorted(identity_of(number).peer_id for number in (201, 202, 203))


@asynccontextmanager
async def seats() -> AsyncIterator[tuple[Run, GridAssignment]]:
    """One peer at step 3; more than two are a grid."""
    async with run_of_one() as run:
        yield run, GridAssignment(run.tracker, run.endpoint.peer_id, 2, random.Random(1))


async def all_sit(run: Run, seating: GridAssignment) -> dict[int, PeerId]:
    """The others take the cells that are left of a grid of 2x2; returns who is where."""
    for peer_id in OTHERS:
        await run.hears(peer_id)
    seating.position()
    free = sorted(set(range(4)) - {run.tracker.seat()[1].cell})
    for cell, peer_id in zip(free, OTHERS, strict=True):
        await run.hears(peer_id, seat=Seat(GRID, cell), seat_round=2 * HERE.step)
    return dict(zip(free, OTHERS, strict=True))


async def test_up_to_the_size_of_a_group_nobody_has_a_seat() -> None:
    async with seats() as (run, seating):
        await run.hears(OTHERS[0])
        assert seating.position() == HERE
        assert list(seating.expected()) == [OTHERS[0]]
        assert not seating.begin_step()
        assert run.tracker.seat() == (0, NO_SEAT)


async def test_above_it_each_has_a_seat_and_expects_its_row_and_then_its_column() -> None:
    async with seats() as (run, seating):
        others = await all_sit(run, seating)
        seating.position()
        number, seat = run.tracker.seat()
        assert (number, seat.layout) == (2 * HERE.step, GRID)
        assert seating.is_settled
        assert seating.begin_step()
        assert (seating.num_rounds, seating.num_rounds_left) == (2, 2)
        first = seating.position()
        assert (first.step, first.lineage) == (6, HERE.lineage)
        assert first.group_key == f"2x2 {seat.cell % 2}", "round 6 goes along the first axis"
        (mate,) = seating.expected()
        assert mate == others[(seat.cell + 2) % 4]
        seating.next_round()
        second = seating.position()
        assert (second.step, second.group_key) in [(7, "2x2 0"), (7, "2x2 2")]
        (other_mate,) = seating.expected()
        assert other_mate != mate


async def test_within_a_step_nobody_moves_and_a_failed_one_begins_anew() -> None:
    async with seats() as (run, seating):
        others = await all_sit(run, seating)
        seating.begin_step()
        seating.next_round()
        where, expected = seating.position(), dict(seating.expected())
        await run.hears(min(others.values()), seat=Seat(GRID, run.tracker.seat()[1].cell), seat_round=6)
        assert seating.position() == where
        for _ in range(3):  # after the last round it stays there until the step is made
            seating.next_round()
            assert seating.position() == where
        assert expected
        seating.end_step()
        assert seating.position().step == 6


async def test_its_seat_moves_on_by_itself_and_is_said_again_before_nobody_can_reckon_it() -> None:
    async with seats() as (run, seating):
        await all_sit(run, seating)
        said = run.tracker.seat()
        run.tracker.move(NEXT, 20, OTHERS)
        assert seating.position().step == 2 * NEXT.step
        assert run.tracker.seat() == said
        assert len(seating.expected()) == 1, "the others moved too, each as its seat says"
        later = NEXT.step + MAX_ROUNDS_AGO // 2
        for step in range(NEXT.step, later + 1):
            run.tracker.move(type(NEXT)(step, b"later"), 20, OTHERS)
            seating.position()
        assert run.tracker.seat() != said


async def test_of_two_in_one_cell_the_higher_takes_another() -> None:
    async with seats() as (run, seating):
        await all_sit(run, seating)
        mine = run.tracker.seat()[1]
        lowest = min(OTHERS)
        await run.hears(lowest, seat=mine, seat_round=2 * HERE.step)
        seating.position()
        moved = run.tracker.seat()[1]
        assert (moved == mine) == (run.endpoint.peer_id < lowest)
