from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

from manyhands.runtime.waker import Waker
from tests.traced import traced_memory


async def test_a_task_hears_another_thread() -> None:
    waker, done = Waker(), threading.Event()

    def work() -> None:
        waker.wake()  # nothing has changed yet
        done.set()
        waker.wake()

    waiting = asyncio.ensure_future(waker.wait_until(done.is_set))
    await asyncio.sleep(0)
    assert not waiting.done()
    threading.Thread(target=work).start()
    await asyncio.wait_for(waiting, 5.0)


async def test_a_condition_that_already_holds_is_not_waited_for() -> None:
    await asyncio.wait_for(Waker().wait_until(lambda: True), 5.0)
    assert Waker().block_until(lambda: True, 0.0)


async def test_all_waiting_tasks_are_woken() -> None:
    waker, done = Waker(), threading.Event()
    waiting = [asyncio.ensure_future(waker.wait_until(done.is_set)) for _ in range(3)]
    cancelled = asyncio.ensure_future(waker.wait_until(lambda: False))
    await asyncio.sleep(0)
    cancelled.cancel()
    done.set()
    waker.wake()
    await asyncio.wait_for(asyncio.gather(*waiting), 5.0)
    await asyncio.gather(cancelled, return_exceptions=True)


async def test_those_that_have_waited_are_forgotten() -> None:
    waker = Waker()
    with traced_memory() as num_held:
        for _ in range(1000):
            waiting = asyncio.ensure_future(waker.wait_until(lambda: False))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            await waker.wait_until(lambda: True)
            assert not waker.block_until(lambda: False, 0.0)
        assert num_held() < 50_000


def test_a_thread_waits_for_another_one_and_no_longer_than_it_was_told() -> None:
    waker, done = Waker(), threading.Event()
    threading.Timer(0.05, lambda: (done.set(), waker.wake())).start()
    assert waker.block_until(done.is_set, 5.0)
    began = time.monotonic()
    assert not waker.block_until(lambda: False, 0.05)
    assert time.monotonic() - began >= 0.05


def test_waking_a_waiter_of_a_closed_loop_is_harmless() -> None:
    waker = Waker()

    async def begin_to_wait() -> Coroutine[Any, Any, None]:
        waiting = waker.wait_until(lambda: False)
        waiting.send(None)
        return waiting

    waiting = asyncio.run(begin_to_wait())
    waker.wake()
    waiting.close()
