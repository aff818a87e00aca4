from __future__ import annotations

import asyncio
from collections.abc import Iterator

from manyhands.averaging.allreduce.butterfly import Condition, Pausing
from manyhands.runtime.waker import Waker

ONE, TWO = memoryview(b"1"), memoryview(b"2")


async def test_on_a_loop_it_ends_at_once_and_goes_on_when_the_condition_holds() -> None:
    waker, is_there = Waker(), [False]

    def source() -> Iterator[memoryview | Condition]:
        yield ONE
        while not is_there[0]:
            yield lambda: is_there[0]
        yield TWO

    pieces = Pausing(source(), waker)
    await pieces.wait()
    assert list(pieces) == [ONE]
    assert not pieces.is_over
    assert list(pieces) == []
    waiting = asyncio.ensure_future(pieces.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    is_there[0] = True
    waker.wake()
    await asyncio.wait_for(waiting, 5.0)
    assert list(pieces) == [TWO]
    assert pieces.is_over


async def test_a_thread_waits_a_moment_itself_and_then_ends() -> None:
    waker, asked = Waker(), [0]

    def after_three() -> bool:
        asked[0] += 1
        waker.wake()
        return asked[0] > 3

    def source() -> Iterator[memoryview | Condition]:
        yield after_three
        yield ONE
        yield lambda: False
        yield TWO

    pieces = Pausing(source(), waker)
    assert await asyncio.to_thread(list, pieces) == [ONE]
    assert not pieces.is_over
    assert await asyncio.to_thread(list, pieces) == [TWO]
    assert pieces.is_over
