"""Where a peer of a large run sits, against a DHT whose answers the test writes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from manyhands.averaging.grid.seats import MAX_ROUNDS_AGO, NO_SEAT, Layout, Seat
from manyhands.averaging.messages import Position
from manyhands.averaging.roster import Roster, Standing
from manyhands.base.identity import PeerId
from manyhands.optim.run.grid_assignment import GridAssignment
from tests.swarm import identity_of
from tests.unit.optim.test_tracker import HERE, NEXT, Run, run_of_one

GRID = Layout((2, 2))
ROSTER = Roster(round=3)
OTHERS = sorted(identity_of(number).peer_id for number in (201, 202, 203))


@asynccontextmanager
async def seats() -> AsyncIterator[tuple[Run, GridAssignment]]:
    """One peer at step 3; more than two are a grid."""
    async with run_of_one() as run:
        run.tracker.roster = lambda: ROSTER
        assignment = GridAssignment(run.tracker, run.endpoint, 2, random.Random(1))
        run.tracker.on_outlook = assignment.plan
        yield run, assignment


async def all_sit(run: Run, assignment: GridAssignment) -> dict[int, PeerId]:
    """The others take the cells that are left of a grid of 2x2; returns who is where."""
    for peer_id in OTHERS:
        await run.hears(peer_id)
    assignment.position()
    free = sorted(set(range(4)) - {run.tracker.own.seat.cell})
    for cell, peer_id in zip(free, OTHERS, strict=True):
        await run.hears(peer_id, seat=Seat(GRID, cell, 2 * HERE.step))
    return dict(zip(free, OTHERS, strict=True))


async def stays_in_one_group(assignment: GridAssignment, run: Run) -> bool:
    is_one = assignment.position() == run.tracker.own.position and not assignment.begin_step()
    return is_one and run.tracker.own.seat == NO_SEAT


async def hears_many(run: Run, position: Position, **fields: object) -> None:
    """Many identities say that they are at a position."""
    for number in range(300, 320):
        await run.hears(identity_of(number).peer_id, position, **fields)


async def test_many_records_make_no_grid_of_a_run_whose_last_step_was_made_in_one_group() -> None:
    """Neither by their number nor by the seats that they name."""
    async with seats() as (run, assignment):
        run.tracker.move(NEXT, 20, [run.endpoint.peer_id, OTHERS[0]])
        await run.hears(OTHERS[0], NEXT)
        await hears_many(run, NEXT)
        assert await stays_in_one_group(assignment, run)
        await hears_many(run, NEXT, seat=Seat(GRID, 1, 2 * NEXT.step), sketch=b"some")
        assert await stays_in_one_group(assignment, run)


async def test_after_a_step_of_more_peers_than_a_group_has_all_of_them_take_seats() -> None:
    async with seats() as (run, assignment):
        run.tracker.move(NEXT, 20, [run.endpoint.peer_id, *OTHERS[:2]])
        await run.hears(OTHERS[0], NEXT)
        await run.hears(OTHERS[1], NEXT)
        assert assignment.begin_step()
        assert assignment.roster() is None
        assert run.tracker.own.seat.layout.sides == (2, 2)


async def test_a_newcomer_begins_no_grid_where_others_have_made_a_step() -> None:
    """It goes to one group with them, however many newcomers there are, and to a grid if one of them stands in one."""
    async with seats() as (run, assignment):
        await run.hears(OTHERS[0], NEXT, sketch=b"some")  # it is a step ahead now
        for peer_id in OTHERS[1:]:
            await run.hears(peer_id)
        await hears_many(run, HERE)
        assert await stays_in_one_group(assignment, run)
        await run.hears(OTHERS[0], sketch=b"some", seat=Seat(GRID, 1, 2 * HERE.step))
        assert assignment.begin_step()


async def test_a_peer_that_has_loaded_a_state_takes_the_grid_of_members() -> None:
    async with seats() as (run, assignment):
        run.tracker.roster = lambda: Roster({OTHERS[0]: Standing(is_member=True)}, round=3)
        run.tracker.move(NEXT, 20, [run.endpoint.peer_id, OTHERS[0]])
        later = Position(NEXT.step + 2, b"later")
        run.tracker.load(later, 60)
        await run.hears(OTHERS[0], later, sketch=b"some")
        await hears_many(run, later, seat=Seat(GRID, 1, 2 * later.step), sketch=b"some")
        assert await stays_in_one_group(assignment, run)
        await run.hears(OTHERS[0], later, sketch=b"some", seat=Seat(GRID, 2, 2 * later.step))
        assert assignment.begin_step()


async def test_up_to_the_size_of_a_group_nobody_has_a_seat() -> None:
    async with seats() as (run, assignment):
        await run.hears(OTHERS[0])
        assert assignment.position() == HERE
        assert list(assignment.expected()) == [OTHERS[0]]
        assert assignment.roster() == ROSTER
        assert not assignment.begin_step()
        assert run.tracker.own.seat == NO_SEAT


async def test_in_a_grid_a_peer_expects_its_row_and_then_its_column() -> None:
    async with seats() as (run, assignment):
        others = await all_sit(run, assignment)
        assignment.position()
        seat = run.tracker.own.seat
        assert (seat.round_number, seat.layout) == (2 * HERE.step, GRID)
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


async def test_a_seat_stays_within_a_step_and_a_failed_step_begins_with_its_first_round() -> None:
    async with seats() as (run, assignment):
        others = await all_sit(run, assignment)
        assignment.begin_step()
        assignment.next_round()
        where, expected = assignment.position(), dict(assignment.expected())
        await run.hears(min(others.values()), seat=Seat(GRID, run.tracker.own.seat.cell, 6))
        assert assignment.position() == where
        for _ in range(3):  # after the last round it stays there until the step is made
            assignment.next_round()
            assert assignment.position() == where
        assert expected
        assignment.end_step()
        assert assignment.position().step == 6


async def test_a_seat_moves_on_by_itself_and_is_published_again_before_it_is_too_old() -> None:
    async with seats() as (run, assignment):
        await all_sit(run, assignment)
        said = run.tracker.own.seat
        run.tracker.move(NEXT, 20, OTHERS)
        assert assignment.position().step == 2 * NEXT.step
        assert run.tracker.own.seat == said
        assert len(assignment.expected()) == 1, "the others moved too, each as its seat says"
        later = NEXT.step + MAX_ROUNDS_AGO // 2
        for step in range(NEXT.step, later + 1):
            run.tracker.move(type(NEXT)(step, b"later"), 20, OTHERS)
            assignment.position()
        assert run.tracker.own.seat != said


async def test_of_two_peers_in_one_cell_the_one_with_the_higher_id_takes_another() -> None:
    async with seats() as (run, assignment):
        await all_sit(run, assignment)
        mine = run.tracker.own.seat
        lowest = min(OTHERS)
        await run.hears(lowest, seat=mine)
        assignment.position()
        moved = run.tracker.own.seat
        assert (moved == mine) == (run.endpoint.peer_id < lowest)


async def test_the_least_patience_is_the_median_batch_of_the_members_here() -> None:
    """Neither strangers change it, nor a minority of the members."""
    async with seats() as (run, assignment):
        assignment.max_group_size = 100
        assert assignment.attendees().batch_s == 0.0
        standing = Standing(is_member=True)
        run.tracker.roster = lambda: Roster(dict.fromkeys([run.endpoint.peer_id, *OTHERS[:2]], standing), round=3)
        run.tracker.report(0, 1.0, batch_s=1.0)
        await run.hears(OTHERS[0], batch_s=3.0)
        await run.hears(OTHERS[1], batch_s=1000.0)
        assert assignment.attendees().batch_s == 3.0
        await hears_many(run, HERE, batch_s=1000.0)
        assert assignment.attendees().batch_s == 3.0
        await run.hears(OTHERS[1], batch_s=0.0)  # it has computed none yet
        assert assignment.attendees().batch_s == 3.0
        run.tracker.roster = lambda: ROSTER
        assert assignment.attendees().batch_s == 1000.0, "without members all count"
