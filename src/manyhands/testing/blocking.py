"""Blocking code on a virtual loop: a training loop as users write it, in a world where nothing may block.

The blocking function runs in a greenlet. Where it would wait, it hands an awaitable to the loop and goes on when that
is done, so the code under test is the code that users run, not an asynchronous copy of it.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import greenlet

from manyhands.base.deadline import time_limit
from manyhands.peer import Presence

T = TypeVar("T")


class _Blocking(greenlet.greenlet):  # type: ignore[misc]
    """A greenlet that runs blocking code; its parent awaits what it hands over."""


async def run_blocking(function: Callable[[], T]) -> T:
    """Run a function that waits by :func:`wait_for`; cancelling this raises ``CancelledError`` where it waits."""
    blocking = _Blocking(function)
    blocking.gr_context = contextvars.copy_context()  # it belongs to the same host
    outcome: Any = blocking.switch()
    while not blocking.dead:
        try:
            result = await outcome
        except BaseException:  # noqa: BLE001 (it is raised where the blocking code waits)
            outcome = blocking.throw(*sys.exc_info())
        else:
            outcome = blocking.switch(result)
    value: T = outcome
    return value


def wait_for(awaitable: Awaitable[T]) -> T:
    """Wait, from within a function that :func:`run_blocking` runs."""
    current = greenlet.getcurrent()
    if not isinstance(current, _Blocking) or current.parent is None:
        raise RuntimeError("this waits inside a simulated world only; start it with run_blocking(function)")
    result: T = current.parent.switch(awaitable)
    return result


class SimPeer:
    """Stands where a :class:`manyhands.Peer` stands, for blocking code in a simulated world."""

    def __init__(self, presence: Presence) -> None:
        self.presence = presence
        self.peer_id = presence.peer_id
        self.endpoint = presence.endpoint
        self.dht = presence.dht

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float, phase: str) -> T:
        """As :meth:`manyhands.Peer.run`."""

        async def bounded() -> T:
            async with time_limit(timeout_s, phase):
                return await coro

        return wait_for(bounded())

    def time(self) -> float:
        """Virtual seconds."""
        return asyncio.get_event_loop().time()

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass, as computing would."""
        wait_for(asyncio.sleep(seconds))
