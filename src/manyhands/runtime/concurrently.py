"""Runs several coroutines concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gathered(*coros: Coroutine[Any, Any, T]) -> list[T]:
    """Run coroutines and return their results in order; like ``asyncio.gather``, with half of its callbacks."""
    if len(coros) == 1:
        return [await coros[0]]
    tasks = [asyncio.get_running_loop().create_task(coro) for coro in coros]
    try:
        return [await task for task in tasks]
    except BaseException:
        await _end(tasks)
        raise


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
