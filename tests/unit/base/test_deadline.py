"""Bounded waits: whose time was over, and what is said of it."""

import asyncio

import pytest

from manyhands.base.deadline import time_limit, wait_at_most, while_moving
from manyhands.base.errors import Timeout
from manyhands.testing.virtual_loop import VirtualLoop

SHORT_S = 0.01
LONG_S = 60.0


async def never() -> None:
    await asyncio.Event().wait()


async def test_a_timeout_names_the_phase_and_the_time() -> None:
    with pytest.raises(Timeout, match=r"^timed out after 0\.01 s waiting for godot$") as caught:
        async with time_limit(SHORT_S, "waiting for godot"):
            await never()
    assert (caught.value.phase, caught.value.timeout_s) == ("waiting for godot", SHORT_S)


async def test_a_time_limit_of_zero_ends_the_block() -> None:
    with pytest.raises(Timeout):
        async with time_limit(0, "waiting"):
            await never()


async def test_work_that_ends_in_time_is_left_alone() -> None:
    async with time_limit(LONG_S, "waiting"):
        await asyncio.sleep(0)
        result = 1
    assert result == 1


@pytest.mark.parametrize("timeout_s", [0, LONG_S])
async def test_a_timeout_error_of_somebody_else_passes_through(timeout_s: float) -> None:
    """Even when our time is over too: what ended the wait was theirs."""
    theirs = asyncio.TimeoutError("theirs")
    with pytest.raises(asyncio.TimeoutError) as caught:
        async with time_limit(timeout_s, "ours"):
            raise theirs
    assert caught.value is theirs


async def test_a_wait_for_of_somebody_else_passes_through() -> None:
    with pytest.raises(asyncio.TimeoutError):
        async with time_limit(LONG_S, "ours"):
            await asyncio.wait_for(never(), SHORT_S)


async def test_the_inner_of_nested_time_limits_may_end_first() -> None:
    with pytest.raises(Timeout) as caught:
        async with time_limit(LONG_S, "outer"), time_limit(SHORT_S, "inner"):
            await never()
    assert caught.value.phase == "inner"


async def test_the_outer_of_nested_time_limits_may_end_first() -> None:
    with pytest.raises(Timeout) as caught:
        async with time_limit(SHORT_S, "outer"), time_limit(LONG_S, "inner"):
            await never()
    assert caught.value.phase == "outer"


async def test_after_an_inner_timeout_the_outer_block_goes_on() -> None:
    async with time_limit(LONG_S, "outer"):
        with pytest.raises(Timeout, match="inner"):
            async with time_limit(SHORT_S, "inner"):
                await never()
        await asyncio.sleep(0)


async def test_being_cancelled_is_not_a_timeout() -> None:
    entered = asyncio.Event()

    async def wait() -> None:
        async with time_limit(LONG_S, "ours"):
            entered.set()
            await never()

    task = asyncio.create_task(wait())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_other_errors_pass_through() -> None:
    with pytest.raises(KeyError):
        async with time_limit(LONG_S, "ours"):
            raise KeyError


async def test_work_that_gets_on_takes_as_long_as_it_needs() -> None:
    moved = 0

    async def work() -> str:
        nonlocal moved
        for _ in range(10):
            await asyncio.sleep(0.02)
            moved += 5
        return "done"

    assert await while_moving(work(), lambda: moved, at_least=5, within_s=0.1, phase="working") == "done"


@pytest.mark.parametrize("step", [0, 1])
async def test_work_that_stands_still_or_crawls_is_ended(step: int) -> None:
    moved = 0
    ended = asyncio.Event()

    async def work() -> None:
        nonlocal moved
        try:
            while True:
                await asyncio.sleep(0.02)
                moved += step
        finally:
            await asyncio.sleep(0)
            ended.set()

    with pytest.raises(Timeout, match=r"^timed out after 0\.1 s for the next bytes$"):
        await while_moving(work(), lambda: moved, at_least=50, within_s=0.1, phase="for the next bytes")
    assert ended.is_set()


async def test_an_exception_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await while_moving(work(), lambda: 0, at_least=1, within_s=60.0, phase="working")


async def test_cancelling_the_wait_cancels_the_work() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await never()
        finally:
            ended.set()

    waiting = asyncio.ensure_future(while_moving(work(), lambda: 0, at_least=1, within_s=60.0, phase="working"))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert ended.is_set()


@pytest.mark.parametrize(("set_at_s", "waited_s"), [(None, 3.0), (1.0, 1.0), (0.0, 0.0)])
def test_a_wait_for_an_event_ends_when_it_is_set_or_in_time(set_at_s: float | None, waited_s: float) -> None:
    async def wait() -> float:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        if set_at_s is not None:
            loop.call_later(set_at_s, event.set)
        started = loop.time()
        await wait_at_most(event, 3.0)
        return loop.time() - started

    assert VirtualLoop().run(wait()) == waited_s


def test_a_wait_for_an_event_that_is_cancelled_leaves_no_timer() -> None:
    async def give_up() -> None:
        waiting = asyncio.create_task(wait_at_most(asyncio.Event(), 1000.0))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()

    loop = VirtualLoop()
    loop.run(give_up())
    assert loop.now == 1.0
