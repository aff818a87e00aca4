"""Iterates over pieces of a stream that become available one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from manyhands.runtime.waker import Waker

Condition = Callable[[], bool]

SOON_S = 0.02
"""How long a thread waits: starting another one later costs more."""


class Pausing(Iterator[memoryview]):
    """Stops when its source yields a condition that does not hold soon; a later call continues there.

    So no thread waits indefinitely: it ends, and the event loop waits for the condition.

    Args:
        source: yields pieces and conditions.
        waker: wakes when a condition may have begun to hold.

    Attributes:
        is_over: whether the source has ended.
    """

    def __init__(self, source: Iterator[memoryview | Condition], waker: Waker) -> None:
        self.is_over = False
        self._source = source
        self._waker = waker
        self._condition: Condition = lambda: True

    async def wait(self) -> None:
        """Wait until it can continue. Unbounded: use a timeout."""
        await self._waker.wait_until(self._condition)

    def __next__(self) -> memoryview:
        for piece in self._source:
            if isinstance(piece, memoryview):
                return piece
            self._condition = piece
            if _is_on_loop() or not self._waker.block_until(piece, SOON_S):
                raise StopIteration
        self.is_over = True
        raise StopIteration


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
