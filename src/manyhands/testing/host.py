"""A machine of the simulated world, with one process on it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from manyhands.testing.virtual_loop import VirtualLoop, current_host

T = TypeVar("T")

EPOCH_S = 1_800_000_000.0
"""The wall clock of a host without skew at virtual time 0, in seconds since 1970."""


class Host:
    """Runs tasks that can be frozen together, and killed together.

    Attributes:
        name: as in the fault schedule.
        ip: its address in the simulated network.
        is_alive: False from a kill to a restart.
        is_frozen: its process does not run, and its machine still acknowledges packets.
        skew_s: how far its wall clock is ahead.
    """

    def __init__(self, loop: VirtualLoop, name: str, ip: str) -> None:
        self.name = name
        self.ip = ip
        self.is_alive = True
        self.is_frozen = False
        self.skew_s = 0.0
        self.context = contextvars.copy_context()
        self._loop = loop
        self._tasks: list[asyncio.Task[Any]] = []
        self._waiting: list[tuple[Callable[[], None], contextvars.Context]] = []
        self.context.run(current_host.set, _Life(self))

    def __repr__(self) -> str:
        return f"Host({self.name})"

    def spawn(self, coro: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Run a coroutine as part of this host's process; its tasks and timers belong to the host as well."""
        if not self.is_alive:
            coro.close()
            raise RuntimeError(f"host {self.name} is dead; restart it first")
        task = self.context.run(self._loop.create_task, coro, name=name or f"task of {self.name}")
        self._tasks = [task for task in self._tasks if not task.done()] + [task]
        return task

    def wall_clock(self) -> float:
        """What this host believes the time is, in seconds since 1970."""
        return EPOCH_S + self._loop.time() + self.skew_s

    def freeze(self) -> None:
        """Nothing of the process runs until :meth:`thaw`."""
        self.is_frozen = True

    def thaw(self) -> None:
        """All that became due meanwhile runs now, in order."""
        self.is_frozen = False
        waiting, self._waiting = self._waiting, []
        for resume, context in waiting:
            self._loop.call_soon(resume, context=context)

    def kill(self) -> None:
        """SIGKILL: no task of the process ever runs again, not even its clean-up."""
        self.is_alive = self.is_frozen = False
        self._waiting.clear()

    def restart(self) -> None:
        """The machine is ready for a new process; nothing of the old one remains."""
        self.is_alive = True
        self.context = contextvars.copy_context()
        self.context.run(current_host.set, _Life(self))

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Unfinished tasks that were spawned here directly."""
        return [task for task in self._tasks if not task.done()] if self.is_alive else []

    def hold(self, resume: Callable[[], None], context: contextvars.Context) -> None:
        """Keep a callback until the host thaws."""
        self._waiting.append((resume, context))


class _Life:
    """One process on a host: the callbacks of an earlier one never run, also after a restart."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def may_run(self, resume: Callable[[], None], context: contextvars.Context) -> bool:
        host = self.host
        if not host.is_alive or host.context.get(current_host) is not self:
            return False
        if host.is_frozen:
            host.hold(resume, context)
            return False
        return True
