"""Work beside the loop that is never left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_end(work: Callable[..., T], *args: Any) -> T:
    """Run short work on a thread of the loop's executor.

    Nothing can stop it there. So who is cancelled meanwhile waits until it has ended: it may write to memory that is
    used for something else next.
    """
    job = asyncio.get_running_loop().run_in_executor(None, work, *args)
    was_cancelled = False
    while not job.done():
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError:
            was_cancelled = True
    if was_cancelled:
        job.exception()  # nobody wants it any more
        raise asyncio.CancelledError
    return job.result()
