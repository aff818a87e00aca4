"""When one peer loads the state of the majority, against a DHT whose answers the test writes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from manyhands.averaging.messages import Position
from manyhands.averaging.sketch import packed
from manyhands.base.identity import PeerId
from manyhands.optim.run.drift import BOUND, KEPT_STEPS, RELOAD_PERIOD_STEPS, Drift
from manyhands.optim.run.signed_sums import Sketch
from tests.unit.optim.test_tracker import BOB, CAROL, HERE, NEXT, Run, run_of_one

RIGHT, WRONG = packed([1.0] * 16), packed([1.5] * 16)


@asynccontextmanager
async def drifting() -> AsyncIterator[tuple[Run, Drift]]:
    async with run_of_one() as run:
        yield run, Drift(run.tracker.reader, run.endpoint.peer_id, BOUND)


async def hear(run: Run, sketch: bytes, position: Position = HERE, peers: tuple[PeerId, ...] = (BOB, CAROL)) -> None:
    for peer_id in peers:
        await run.hears(peer_id, position, sketch=sketch, sketch_step=position.step)


def step_of(number: int) -> Position:
    return Position(number, b"step %d" % number)


async def go_to(run: Run, drift: Drift, position: Position, own: bytes) -> None:
    """Everybody makes a step; the others hold what is right."""
    run.tracker.move(position, 20, [BOB, CAROL])
    drift.moved(position, Sketch(own, 4.0), is_in_grid=False)
    await hear(run, RIGHT, position)


async def test_how_far_apart_all_are() -> None:
    async with drifting() as (run, drift):
        assert drift.disagreement() is None
        drift.moved(HERE, Sketch(packed([1.0] * 16), 4.0), is_in_grid=True)
        assert drift.disagreement() is None
        await run.hears(BOB, sketch=packed([3.0] * 16), sketch_step=HERE.step)
        await run.hears(CAROL, sketch=packed([9.0] * 16), sketch_step=HERE.step - 1)
        assert drift.disagreement() == 0.5, "each is 1 from the mean, which is 2"


async def test_how_far_apart_this_peer_and_the_majority_are() -> None:
    dave = PeerId("dave")
    async with drifting() as (run, drift):
        await go_to(run, drift, HERE, RIGHT)
        await hear(run, packed([1e30] * 16), HERE, (dave,))
        assert drift.disagreement() == 0.0
        await go_to(run, drift, NEXT, WRONG)
        await hear(run, RIGHT, NEXT, (PeerId("erin"),))
        await hear(run, packed([1e30] * 16), NEXT, (dave,))
        assert drift.disagreement() == pytest.approx(0.1925, rel=1e-3), "three hold 1, this peer 1.5"


async def test_who_is_far_off_loads_the_state_once(caplog: pytest.LogCaptureFixture) -> None:
    async with drifting() as (run, drift):
        await go_to(run, drift, HERE, WRONG)
        assert drift.should_load()
        assert not drift.should_load(), "at one position it is tried once"
        drift.loaded(HERE)
        assert not drift.should_load()
        assert len(caplog.messages) == 1


async def test_while_nobody_hands_it_out_it_is_tried_once_in_a_step(caplog: pytest.LogCaptureFixture) -> None:
    async with drifting() as (run, drift):
        for number in (4, 5, 6):
            await go_to(run, drift, step_of(number), WRONG)
            assert [drift.should_load() for _ in range(3)] == [True, False, False]
        assert len(caplog.messages) == 1


async def test_when_loading_does_not_help_it_says_so_and_tries_again_much_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with drifting() as (run, drift):
        loads = []
        for number in range(4, 3 * RELOAD_PERIOD_STEPS):
            await go_to(run, drift, step_of(number), WRONG)
            if drift.should_load():
                loads.append(number)
                drift.loaded(step_of(number))
        assert loads == [4, 4 + RELOAD_PERIOD_STEPS, 4 + 2 * RELOAD_PERIOD_STEPS]
        assert len(caplog.messages) == 2 * len(loads)
        assert all("although it has loaded" in text for text in caplog.messages[1::2])


async def test_who_has_loaded_is_judged_from_its_next_step_on() -> None:
    async with drifting() as (run, drift):
        await go_to(run, drift, HERE, RIGHT)
        drift.loaded(HERE)
        await hear(run, WRONG, HERE)
        assert not drift.should_load()
        assert drift.disagreement() is None
        await go_to(run, drift, NEXT, WRONG)
        assert drift.should_load()


async def test_of_those_whom_nobody_can_dial_no_state_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    async with drifting() as (run, drift):
        drift.moved(HERE, Sketch(WRONG, 6.0), is_in_grid=False)
        for peer_id in (BOB, CAROL):
            await run.hears(peer_id, sketch=RIGHT, sketch_step=HERE.step, is_client=True)
        assert not drift.should_load()
        assert not drift.should_load()
        assert len(caplog.messages) == 1
        assert "nobody can dial" in caplog.messages[0]


async def test_others_who_are_far_off_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async with drifting() as (run, drift):
        for number in range(4, 12):
            await go_to(run, drift, step_of(number), RIGHT)
            await hear(run, WRONG if number in {5, 6, 9} else RIGHT, step_of(number), (BOB,))
            assert not drift.should_load()
        assert caplog.messages == [
            f"The parameters of peer {BOB} are 50.00% of their size away from those that 2 of 3 peers hold (rounding "
            "stays below 0.05%)"
        ]


async def test_what_is_read_late_is_compared_with_what_was_held_then() -> None:
    async with drifting() as (run, drift):
        drift.moved(HERE, Sketch(WRONG, 6.0), is_in_grid=False)
        run.tracker.move(NEXT, 20, [BOB, CAROL])
        drift.moved(NEXT, Sketch(WRONG, 6.0), is_in_grid=False)
        assert not drift.should_load()
        await hear(run, RIGHT, HERE)
        assert drift.should_load()


async def test_a_position_that_is_known_from_a_round_only_says_nothing_of_what_is_held_there() -> None:
    async with drifting() as (run, drift):
        await hear(run, RIGHT, HERE)
        run.tracker.move(NEXT, 20, [BOB, CAROL])
        drift.moved(NEXT, Sketch(packed([2.0] * 16), 8.0), is_in_grid=False)
        assert run.position_of(BOB) == NEXT
        assert drift.disagreement() is None
        assert not drift.should_load()


async def test_old_positions_and_other_branches_are_not_compared() -> None:
    async with drifting() as (run, drift):
        for number in range(3, 3 + KEPT_STEPS + 1):
            drift.moved(step_of(number), Sketch(WRONG, 6.0), is_in_grid=False)
        await hear(run, RIGHT, step_of(3))
        assert not drift.should_load()
        await hear(run, RIGHT, Position(3 + KEPT_STEPS, b"another"))
        assert not drift.should_load()
        await hear(run, RIGHT, step_of(3 + KEPT_STEPS))
        assert drift.should_load()


async def test_in_a_grid_nobody_is_judged_nor_by_what_was_held_before_it() -> None:
    async with drifting() as (run, drift):
        for number, is_in_grid in ((3, False), (4, True)):
            drift.moved(step_of(number), Sketch(WRONG, 6.0), is_in_grid=is_in_grid)
            await hear(run, RIGHT, step_of(number))
        assert not drift.should_load()
        drift.moved(step_of(5), Sketch(WRONG, 6.0), is_in_grid=False)
        assert not drift.should_load(), "the step of the grid does not count"
        await hear(run, RIGHT, step_of(5))
        assert drift.should_load()


async def test_after_a_step_alone_there_is_nothing_to_compare() -> None:
    async with drifting() as (run, drift):
        await go_to(run, drift, HERE, b"")
        assert not drift.should_load()
        assert drift.disagreement() is None


async def test_the_state_comes_from_those_who_hold_what_the_majority_holds() -> None:
    dave = PeerId("dave")
    async with drifting() as (run, drift):
        assert drift.ordered([dave, BOB], HERE) == [dave, BOB]
        await hear(run, RIGHT, HERE)
        assert drift.ordered([dave, BOB], HERE) == [BOB, dave], "so for a newcomer, which holds nothing yet"
        await go_to(run, drift, HERE, RIGHT)
        assert drift.ordered([dave, BOB], HERE) == [BOB, dave]
        await hear(run, WRONG, HERE, (BOB,))
        assert drift.ordered([BOB, dave, CAROL], HERE) == [CAROL, dave, BOB]
