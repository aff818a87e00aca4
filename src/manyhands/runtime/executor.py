"""Runs blocking work beside the loop and never abandons it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_end(work: Callable[..., T], *args: Any) -> T:
    """Run short work on a thread of the loop's executor.

    The work cannot be interrupted. A cancelled caller therefore waits for its end, since it may write to memory that is
    reused afterwards.
    """
    job = asyncio.get_running_loop().run_in_executor(None, work, *args)
    was_cancelled = False
    while not job.done():
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError:
            was_cancelled = True
    if was_cancelled:
        job.exception()  # retrieved, so that it is not logged
        raise asyncio.CancelledError
    return job.result()
