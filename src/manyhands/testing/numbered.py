"""Tasks and futures with the same order in every process, and with a link to their host."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from manyhands.testing.virtual_loop import VirtualHandle


class Life(Protocol):
    """One process of a host: what the loop needs of it."""

    is_running: bool
    """Whether its callbacks run now."""

    def hold(self, handle: VirtualHandle) -> None:
        """Keep a callback until it may run, or drop it if the process is dead."""

    def __str__(self) -> str:
        """The name of the host."""


current_life: contextvars.ContextVar[Life | None] = contextvars.ContextVar("current_life", default=None)


class NumberedFuture(asyncio.Future[Any]):
    """A future that hashes by a serial number instead of its address, so that sets have one order in all processes."""

    number: int | None = None

    def __hash__(self) -> int:
        if self.number is None:
            self.number = self.get_loop().next_serial()  # type: ignore[attr-defined]
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class NumberedTask(asyncio.Task[Any]):
    """A task that hashes by its number, like :class:`NumberedFuture`, and belongs to the life that started it."""

    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, **kwargs: Any) -> None:
        self.number = number
        context: contextvars.Context | None = kwargs.get("context")
        self.life = current_life.get() if context is None else context.get(current_life)
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


def where(task: asyncio.Task[Any]) -> str:
    """The line on which a task waits: the innermost one outside of asyncio."""
    coro: Any = task.get_coro()
    place = "its end"
    while coro is not None:
        frame = getattr(coro, "cr_frame", None)
        if frame is not None and not frame.f_globals.get("__name__", "").startswith("asyncio"):
            file = frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
            place = f"{file}:{frame.f_lineno} in {coro.__qualname__}"
        coro = getattr(coro, "cr_await", None)
    return place
