"""Coroutines that run side by side."""

from __future__ import annotations

import asyncio

from manyhands.runtime.concurrently import gathered


async def number(value: int, after_s: float = 0.0) -> int:
    await asyncio.sleep(after_s)
    return value


async def test_nothing_to_wait_for_takes_no_time() -> None:
    assert await gathered() == []


async def test_results_come_in_order() -> None:
    assert await gathered(number(1, 0.02), number(2)) == [1, 2]
