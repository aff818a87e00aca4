"""Coroutines that run side by side."""

from __future__ import annotations

import asyncio

from manyhands.runtime.concurrently import gathered, gathered_within


async def number(value: int, after_s: float = 0.0) -> int:
    await asyncio.sleep(after_s)
    return value


async def test_nothing_to_wait_for_takes_no_time() -> None:
    assert await gathered_within(1.0) == []
    assert await gathered() == []


async def test_a_coroutine_that_takes_too_long_has_no_result() -> None:
    assert await gathered_within(0.05, number(1), number(2, 10.0)) == [1, None]
