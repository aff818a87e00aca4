"""Closes what an object runs on the network thread if the object is garbage collected without ``close()``."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from manyhands.runtime.tasks import TaskOwner

_CLOSING = TaskOwner("garbage-collected object")


def close_when_lost(
    owner: object, close: Callable[[], Coroutine[Any, Any, None]], loop: asyncio.AbstractEventLoop
) -> None:
    """Run ``close`` on a loop once ``owner`` is garbage collected, as long as that loop runs.

    The collector may run on any thread, also on that of the loop, while any lock is held, so nothing here may wait.

    Args:
        close: must not refer to the owner.
    """
    context = contextvars.copy_context()  # instead of the context of the code that the collector interrupts

    def begin() -> None:
        _CLOSING.spawn(close(), name="closing")

    def on_loss() -> None:
        with suppress(RuntimeError):  # the loop is closed, and so is all that ran on it
            loop.call_soon_threadsafe(begin, context=context)

    finalizer = weakref.finalize(owner, on_loss)
    finalizer.atexit = False  # at the exit of Python the peer is closed
