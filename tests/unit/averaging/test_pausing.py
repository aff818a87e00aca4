from __future__ import annotations

import asyncio
from collections.abc import Iterator

from manyhands.averaging.pausing import Condition, Pausing
from manyhands.runtime.bell import Bell

ONE, TWO = memoryview(b"1"), memoryview(b"2")


async def test_on_a_loop_it_ends_at_once_and_goes_on_when_the_condition_holds() -> None:
    bell, is_there = Bell(), [False]

    def source() -> Iterator[memoryview | Condition]:
        yield ONE
        while not is_there[0]:
            yield lambda: is_there[0]
        yield TWO

    pieces = Pausing(source(), bell)
    await pieces.wait()
    assert list(pieces) == [ONE]
    assert not pieces.is_over
    assert list(pieces) == []
    waiting = asyncio.ensure_future(pieces.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    is_there[0] = True
    bell.ring()
    await asyncio.wait_for(waiting, 5.0)
    assert list(pieces) == [TWO]
    assert pieces.is_over


def test_a_thread_waits_a_moment_itself_and_then_ends() -> None:
    bell, asked = Bell(), [0]

    def after_three() -> bool:
        asked[0] += 1
        bell.ring()
        return asked[0] > 3

    def source() -> Iterator[memoryview | Condition]:
        yield after_three
        yield ONE
        yield lambda: False
        yield TWO

    pieces = Pausing(source(), bell)
    assert list(pieces) == [ONE]
    assert not pieces.is_over
    assert list(pieces) == [TWO]
    assert pieces.is_over


async def test_it_begins_when_it_may() -> None:
    bell, may_begin = Bell(), [False]
    waiting = asyncio.ensure_future(Pausing(iter([ONE]), bell, lambda: may_begin[0]).wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    may_begin[0] = True
    bell.ring()
    await asyncio.wait_for(waiting, 5.0)
