"""Several calls at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(*coros: Coroutine[Any, Any, T]) -> list[T]:
    """What they return, in their order: as ``asyncio.gather``, with half of its callbacks."""
    if len(coros) == 1:
        return [await coros[0]]
    tasks = [asyncio.get_running_loop().create_task(coro) for coro in coros]
    try:
        return [await task for task in tasks]
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
