"""When one peer reloads the state of the majority, against a DHT whose answers the test writes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from manyhands.averaging.messages import Position
from manyhands.averaging.sketch import packed
from manyhands.base.identity import PeerId
from manyhands.optim.run.drift import BOUND, Drift, Sketch
from tests.swarm import identity_of
from tests.unit.optim.test_tracker import BOB, CAROL, DAVE, HERE, NEXT, Run, run_of_one

RIGHT, WRONG = packed([1.0] * 16), packed([1.5] * 16)


@asynccontextmanager
async def drifting() -> AsyncIterator[tuple[Run, Drift]]:
    async with run_of_one() as run:
        yield run, Drift(run.tracker, run.endpoint.peer_id, BOUND, lambda: list(run.tracker.observed()))


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


async def test_disagreement_is_the_distance_of_all_peers_from_their_mean() -> None:
    async with drifting() as (run, drift):
        assert drift.disagreement() is None
        drift.moved(HERE, Sketch(packed([1.0] * 16), 4.0), is_in_grid=True)
        assert drift.disagreement() is None
        await run.hears(BOB, sketch=packed([3.0] * 16), sketch_step=HERE.step)
        await run.hears(CAROL, sketch=packed([9.0] * 16), sketch_step=HERE.step - 1)
        assert drift.disagreement() == 0.5, "each is 1 from the mean, which is 2"


async def test_disagreement_outside_a_grid_is_over_this_peer_and_the_majority() -> None:
    dave = PeerId("dave")
    async with drifting() as (run, drift):
        await go_to(run, drift, HERE, RIGHT)
        await hear(run, packed([1e30] * 16), HERE, (dave,))
        assert drift.disagreement() == 0.0
        await go_to(run, drift, NEXT, WRONG)
        await hear(run, RIGHT, NEXT, (PeerId("erin"),))
        await hear(run, packed([1e30] * 16), NEXT, (dave,))
        assert drift.disagreement() == pytest.approx(0.1925, rel=1e-3), "three hold 1, this peer 1.5"


async def test_a_peer_that_is_far_off_reloads_the_state_once(caplog: pytest.LogCaptureFixture) -> None:
    async with drifting() as (run, drift):
        await go_to(run, drift, HERE, WRONG)
        assert drift.compare()
        drift.tries_reload()
        assert not drift.compare(), "at one position it is tried once"
        drift.loaded()
        assert not drift.compare()
        assert len(caplog.messages) == 1


async def test_a_reload_that_nobody_serves_is_tried_once_in_a_step(caplog: pytest.LogCaptureFixture) -> None:
    async with drifting() as (run, drift):
        for number in (4, 5, 6):
            await go_to(run, drift, step_of(number), WRONG)
            assert drift.compare(), number
            drift.tries_reload()
            assert not drift.compare(), number
        assert len(caplog.messages) == 1


async def test_when_reloading_does_not_help_it_says_so_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async with drifting() as (run, drift):
        loads = []
        for number in range(4, 12):
            await go_to(run, drift, step_of(number), WRONG)
            if drift.compare():
                loads.append(number)
                drift.loaded()
        assert loads == [4]
        assert len(caplog.messages) == 2
        assert "although it has loaded" in caplog.messages[1]


async def test_a_peer_that_has_loaded_a_state_is_judged_from_its_next_step_on() -> None:
    async with drifting() as (run, drift):
        await go_to(run, drift, HERE, RIGHT)
        drift.loaded()
        await hear(run, WRONG, HERE)
        assert not drift.compare()
        assert drift.disagreement() is None
        await go_to(run, drift, NEXT, WRONG)
        assert drift.compare(), "that state was loaded for another reason"


async def test_others_that_are_far_off_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async with drifting() as (run, drift):
        for number in range(4, 12):
            await go_to(run, drift, step_of(number), RIGHT)
            await hear(run, WRONG if number in {5, 6, 9} else RIGHT, step_of(number), (BOB,))
            assert not drift.compare()
        assert caplog.messages == [
            f"The parameters of peer {BOB} differ from those of the majority by 50% (rounding: 0.05%); "
            "that peer should load the majority's state"
        ]


async def test_without_a_majority_nobody_reloads_and_one_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with drifting() as (run, drift):
        for position in (HERE, NEXT):
            run.tracker.move(position, 20, [BOB])
            drift.moved(position, Sketch(WRONG, 6.0), is_in_grid=False)
            await hear(run, b"", position, (BOB,))
            assert not drift.compare()
            assert len(caplog.messages) == (position == NEXT), "the other one has loaded a state and published no sums"
            await hear(run, RIGHT, position, (BOB,))
            assert not drift.compare()
            assert drift.disagreement() == pytest.approx(0.2)
        assert len(caplog.messages) == 1
        assert "of the 2 peers are 20% from their mean (rounding: 0.05%), and no majority of them has" in caplog.text
        assert "another schedule" in caplog.text


async def test_a_position_that_is_known_from_a_round_only_says_nothing_of_what_is_held_there() -> None:
    async with drifting() as (run, drift):
        await hear(run, RIGHT, HERE)
        run.tracker.move(NEXT, 20, [BOB, CAROL])
        drift.moved(NEXT, Sketch(packed([2.0] * 16), 8.0), is_in_grid=False)
        assert run.position_of(BOB) == NEXT
        assert drift.disagreement() is None
        assert not drift.compare()


async def test_old_positions_and_other_branches_are_not_compared() -> None:
    async with drifting() as (run, drift):
        for number in (3, 4):
            drift.moved(step_of(number), Sketch(WRONG, 6.0), is_in_grid=False)
        for position in (step_of(3), Position(4, b"another")):
            await hear(run, RIGHT, position)
            assert not drift.compare()
        await hear(run, RIGHT, step_of(4))
        assert drift.compare()


async def test_in_a_grid_nobody_is_judged() -> None:
    async with drifting() as (run, drift):
        drift.moved(step_of(4), Sketch(WRONG, 6.0), is_in_grid=True)
        await hear(run, RIGHT, step_of(4))
        assert not drift.compare()
        drift.moved(step_of(5), Sketch(WRONG, 6.0), is_in_grid=False)
        await hear(run, RIGHT, step_of(5))
        assert drift.compare()


async def test_after_a_step_alone_there_is_nothing_to_compare() -> None:
    async with drifting() as (run, drift):
        await go_to(run, drift, HERE, b"")
        assert not drift.compare()
        assert drift.disagreement() is None


async def test_donors_that_hold_what_the_majority_holds_are_asked_first() -> None:
    dave = PeerId("dave")
    async with drifting() as (run, drift):
        assert drift.ordered([dave, BOB], HERE) == [dave, BOB]
        await hear(run, RIGHT, HERE)
        assert drift.ordered([dave, BOB], HERE) == [BOB, dave], "so for a newcomer, which holds nothing yet"
        await go_to(run, drift, HERE, RIGHT)
        assert drift.ordered([dave, BOB], HERE) == [BOB, dave]
        await hear(run, WRONG, HERE, (BOB,))
        assert drift.ordered([BOB, dave, CAROL], HERE) == [CAROL, dave, BOB]


async def test_peers_without_a_sketch_count_too() -> None:
    async with drifting() as (run, drift):
        await hear(run, RIGHT)
        assert drift.contradicts(HERE, Sketch(WRONG, 6.0))
        await run.hears(DAVE)
        assert drift.contradicts(HERE, Sketch(WRONG, 6.0)), "two of three have published another one"
        await run.hears(identity_of(77).peer_id)
        assert not drift.contradicts(HERE, Sketch(WRONG, 6.0)), "half is no majority"


async def test_a_mean_of_parameters_is_compared_with_how_far_other_peers_are() -> None:
    async with drifting() as (run, drift):
        assert drift.is_too_far(0.01, 4.0), "nothing is known but rounding"
        assert not drift.is_too_far(4.0 * BOUND, 4.0)
        drift.moved(HERE, Sketch(RIGHT, 4.0), is_in_grid=True)
        await hear(run, packed([1.1] * 16))  # 0.4 away
        await hear(run, packed([1e30] * 16), peers=(DAVE,))
        assert not drift.is_too_far(1.1, 4.0)
        assert drift.is_too_far(1.3, 4.0), "a minority makes no limit larger"
        assert drift.is_too_far(float("nan"), 4.0)
        drift.loaded()
        assert drift.is_too_far(1.1, 4.0), "the sketch was of other parameters"
