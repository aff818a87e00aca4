"""Work beside the loop ends before anybody goes on."""

from __future__ import annotations

import asyncio
import threading

import pytest

from manyhands.runtime.executor import run_to_end


async def test_run_to_end_returns_the_result_and_raises_the_exception() -> None:
    assert await run_to_end(max, 3, 5) == 5
    with pytest.raises(ZeroDivisionError):
        await run_to_end(divmod, 1, 0)


async def test_a_cancelled_caller_waits_for_the_end_of_the_work() -> None:
    began, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        may_end.wait(10.0)
        has_ended.set()

    task = asyncio.ensure_future(run_to_end(work))
    await asyncio.get_running_loop().run_in_executor(None, began.wait, 10.0)
    task.cancel()
    await asyncio.wait([task], timeout=0.05)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert has_ended.is_set()
