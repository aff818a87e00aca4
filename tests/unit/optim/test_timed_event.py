"""A wait that ends when somebody rings."""

from __future__ import annotations

import asyncio

from manyhands.optim.run.timed_event import TimedEvent
from manyhands.testing.virtual_loop import VirtualLoop


def waited_s(bell: TimedEvent, timeout_s: float, ring_at_s: float | None = None) -> float:
    """How long a wait takes."""

    async def wait() -> float:
        loop = asyncio.get_running_loop()
        if ring_at_s is not None:
            loop.call_later(ring_at_s, bell.ring)
        started = loop.time()
        await bell.wait(timeout_s)
        return loop.time() - started

    return VirtualLoop().run(wait())


def test_a_wait_ends_in_time() -> None:
    assert waited_s(TimedEvent(), 3.0) == 3.0


def test_a_ring_ends_it() -> None:
    assert waited_s(TimedEvent(), 3.0, ring_at_s=1.0) == 1.0


def test_who_comes_after_the_ring_does_not_wait() -> None:
    bell = TimedEvent()
    bell.ring()
    bell.ring()
    assert waited_s(bell, 3.0) == 0.0
    assert waited_s(bell, 3.0) == 0.0, "until it is silenced"
    bell.silence()
    assert waited_s(bell, 3.0) == 3.0


def test_who_is_cancelled_leaves_no_timer() -> None:
    async def give_up() -> None:
        bell = TimedEvent()
        waiting = asyncio.create_task(bell.wait(1000.0))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        bell.ring()

    loop = VirtualLoop()
    loop.run(give_up())
    assert loop.now == 1.0
