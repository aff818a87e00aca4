from __future__ import annotations

import asyncio
import threading
import time

from manyhands.runtime.bell import Bell


async def test_a_task_hears_another_thread() -> None:
    bell, done = Bell(), threading.Event()

    def work() -> None:
        bell.ring()  # nothing has changed yet
        done.set()
        bell.ring()

    waiting = asyncio.ensure_future(bell.wait_until(done.is_set))
    await asyncio.sleep(0)
    assert not waiting.done()
    threading.Thread(target=work).start()
    await asyncio.wait_for(waiting, 5.0)


async def test_what_holds_already_is_not_waited_for() -> None:
    await asyncio.wait_for(Bell().wait_until(lambda: True), 5.0)
    assert Bell().block_until(lambda: True, 0.0)


async def test_all_who_wait_are_woken_and_forgotten() -> None:
    bell, done = Bell(), threading.Event()
    waiting = [asyncio.ensure_future(bell.wait_until(done.is_set)) for _ in range(3)]
    cancelled = asyncio.ensure_future(bell.wait_until(lambda: False))
    await asyncio.sleep(0)
    cancelled.cancel()
    done.set()
    bell.ring()
    await asyncio.wait_for(asyncio.gather(*waiting), 5.0)
    await asyncio.gather(cancelled, return_exceptions=True)
    assert not bell._tasks


def test_a_thread_waits_for_another_one_and_no_longer_than_it_was_told() -> None:
    bell, done = Bell(), threading.Event()
    threading.Timer(0.05, lambda: (done.set(), bell.ring())).start()
    assert bell.block_until(done.is_set, 5.0)
    began = time.monotonic()
    assert not bell.block_until(lambda: False, 0.05)
    assert time.monotonic() - began >= 0.05
    assert not bell._threads


def test_a_closed_loop_is_not_in_the_way() -> None:
    bell = Bell()

    async def main() -> None:
        waiting = asyncio.ensure_future(bell.wait_until(lambda: False))
        await asyncio.sleep(0)
        bell._tasks.update({asyncio.get_running_loop().create_future()})
        waiting.cancel()

    asyncio.run(main())
    bell.ring()
