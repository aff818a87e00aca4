"""Runs blocking code, such as a user's training loop, on a virtual loop where nothing may block.

The blocking function runs in a greenlet. Where it would wait, it passes an awaitable to the loop and resumes when that
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
    """A greenlet that runs blocking code; its parent awaits the awaitables."""


async def run_blocking(function: Callable[[], T]) -> T:
    """Run a function that waits by :func:`wait_for`; cancelling this raises ``CancelledError`` where it waits."""
    blocking = _Blocking(function)
    blocking.gr_context = contextvars.copy_context()  # the context of the same host
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
    """Wait for an awaitable, within a function that :func:`run_blocking` runs."""
    current = greenlet.getcurrent()
    if not isinstance(current, _Blocking) or current.parent is None:
        raise RuntimeError("wait_for() works only in a function that run_blocking(function) has started")
    result: T = current.parent.switch(awaitable)
    return result


class SimPeer:
    """Replaces :class:`manyhands.Peer` for blocking code in a simulated world."""

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
