"""Bounded waits: whose time was over, and what is said of it."""

import asyncio

import pytest

from manyhands.base.deadline import time_limit
from manyhands.base.errors import Timeout

SHORT_S = 0.01
LONG_S = 60.0


async def never() -> None:
    await asyncio.Event().wait()


async def test_names_the_phase_and_the_time() -> None:
    with pytest.raises(Timeout, match=r"^timed out after 0\.01 s waiting for godot$") as caught:
        async with time_limit(SHORT_S, "waiting for godot"):
            await never()
    assert (caught.value.phase, caught.value.timeout_s) == ("waiting for godot", SHORT_S)


async def test_no_time_at_all_still_ends() -> None:
    with pytest.raises(Timeout):
        async with time_limit(0, "waiting"):
            await never()


async def test_what_is_done_in_time_is_left_alone() -> None:
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


async def test_nested_the_inner_is_over_first() -> None:
    with pytest.raises(Timeout) as caught:
        async with time_limit(LONG_S, "outer"), time_limit(SHORT_S, "inner"):
            await never()
    assert caught.value.phase == "inner"


async def test_nested_the_outer_is_over_first() -> None:
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
