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


async def all_sit(run: Run, assignment: GridAssignment) -> dict[int, PeerId]:
    """The others take the cells that are left of a grid of 2x2; returns who is where."""
    for peer_id in OTHERS:
        await run.hears(peer_id)
    assignment.position()
    free = sorted(set(range(4)) - {run.tracker.seat()[1].cell})
    for cell, peer_id in zip(free, OTHERS, strict=True):
        await run.hears(peer_id, seat=Seat(GRID, cell), seat_round=2 * HERE.step)
    return dict(zip(free, OTHERS, strict=True))


async def test_up_to_the_size_of_a_group_nobody_has_a_seat() -> None:
    async with seats() as (run, assignment):
        await run.hears(OTHERS[0])
        assert assignment.position() == HERE
        assert list(assignment.expected()) == [OTHERS[0]]
        assert not assignment.begin_step()
        assert run.tracker.seat() == (0, NO_SEAT)


async def test_above_it_each_has_a_seat_and_expects_its_row_and_then_its_column() -> None:
    async with seats() as (run, assignment):
        others = await all_sit(run, assignment)
        assignment.position()
        number, seat = run.tracker.seat()
        assert (number, seat.layout) == (2 * HERE.step, GRID)
        assert assignment.is_settled
        assert assignment.begin_step()
        assert (assignment.num_rounds, assignment.num_rounds_left) == (2, 2)
        first = assignment.position()
        assert (first.step, first.lineage) == (6, HERE.lineage)
        assert first.group_key == f"2x2 {seat.cell % 2}", "round 6 goes along the first axis"
        (mate,) = assignment.expected()
        assert mate == others[(seat.cell + 2) % 4]
        assignment.next_round()
        second = assignment.position()
        assert (second.step, second.group_key) in [(7, "2x2 0"), (7, "2x2 2")]
        (other_mate,) = assignment.expected()
        assert other_mate != mate


async def test_within_a_step_nobody_moves_and_a_failed_one_begins_anew() -> None:
    async with seats() as (run, assignment):
        others = await all_sit(run, assignment)
        assignment.begin_step()
        assignment.next_round()
        where, expected = assignment.position(), dict(assignment.expected())
        await run.hears(min(others.values()), seat=Seat(GRID, run.tracker.seat()[1].cell), seat_round=6)
        assert assignment.position() == where
        for _ in range(3):  # after the last round it stays there until the step is made
            assignment.next_round()
            assert assignment.position() == where
        assert expected
        assignment.end_step()
        assert assignment.position().step == 6


async def test_its_seat_moves_on_by_itself_and_is_said_again_before_nobody_can_reckon_it() -> None:
    async with seats() as (run, assignment):
        await all_sit(run, assignment)
        said = run.tracker.seat()
        run.tracker.move(NEXT, 20, OTHERS)
        assert assignment.position().step == 2 * NEXT.step
        assert run.tracker.seat() == said
        assert len(assignment.expected()) == 1, "the others moved too, each as its seat says"
        later = NEXT.step + MAX_ROUNDS_AGO // 2
        for step in range(NEXT.step, later + 1):
            run.tracker.move(type(NEXT)(step, b"later"), 20, OTHERS)
            assignment.position()
        assert run.tracker.seat() != said


async def test_of_two_in_one_cell_the_higher_takes_another() -> None:
    async with seats() as (run, assignment):
        await all_sit(run, assignment)
        mine = run.tracker.seat()[1]
        lowest = min(OTHERS)
        await run.hears(lowest, seat=mine, seat_round=2 * HERE.step)
        assignment.position()
        moved = run.tracker.seat()[1]
        assert (moved == mine) == (run.endpoint.peer_id < lowest)
