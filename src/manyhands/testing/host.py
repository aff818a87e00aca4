"""A machine of the simulated world, with one process on it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

from manyhands.testing.numbered import current_life
from manyhands.testing.virtual_loop import VirtualHandle, VirtualLoop

T = TypeVar("T")

EPOCH_S = 1_800_000_000.0
"""The wall clock of a host without skew at virtual time 0, in seconds since 1970."""


class HostLife:
    """One process on a host. Its callbacks do not run after it is dead, even if the host restarts.

    Attributes:
        is_running: False while it is frozen, and once it is dead.
        is_alive: False once it is dead.
    """

    def __init__(self, name: str) -> None:
        self.is_running = True
        self.is_alive = True
        self.held: list[VirtualHandle] = []
        self._name = name

    def __str__(self) -> str:
        return self._name

    def hold(self, handle: VirtualHandle) -> None:
        """Keep a callback until the host thaws; callbacks of a dead process are dropped."""
        if self.is_alive:
            self.held.append(handle)


class Host:
    """Runs tasks that can be frozen together, and killed together.

    Attributes:
        name: as in the fault schedule.
        ip: its address in the simulated network.
        skew_s: how far its wall clock is ahead.
        router: between it and the others. With a firewall or a router, others cannot dial it. A *port-preserving*
            router sends connections on with the port that the host chose, a *symmetric* one with another each time.
        life: of its process; a restart begins a new one.
    """

    def __init__(self, loop: VirtualLoop, name: str, ip: str) -> None:
        self.name = name
        self.ip = ip
        self.skew_s = 0.0
        self.router: Literal["none", "firewall", "port-preserving", "symmetric"] = "none"
        self._loop = loop
        self._tasks: list[asyncio.Task[Any]] = []
        self._buried: list[asyncio.Task[Any]] = []  # referenced so that no garbage collection runs their clean-up
        self._begin_life()

    def _begin_life(self) -> None:
        self.life = HostLife(self.name)
        self.context = contextvars.copy_context()
        self.context.run(current_life.set, self.life)

    def __repr__(self) -> str:
        return f"Host({self.name})"

    @property
    def is_alive(self) -> bool:
        """False from a kill to a restart."""
        return self.life.is_alive

    @property
    def is_frozen(self) -> bool:
        """Whether the process is stopped; its machine still acknowledges packets."""
        return self.life.is_alive and not self.life.is_running

    def spawn(self, coro: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Run a coroutine as part of this host's process; its tasks and timers belong to the host as well."""
        if not self.is_alive:
            coro.close()
            raise RuntimeError(f"host {self.name} is dead; restart it first")
        task = self.context.run(self._loop.create_task, coro, name=name or f"task of {self.name}")
        self._tasks = [*self.tasks(), task]
        return task

    def wall_clock(self) -> float:
        """The wall clock of this host, in seconds since 1970."""
        return EPOCH_S + self._loop.time() + self.skew_s

    def freeze(self) -> None:
        """Stop all tasks of the process until :meth:`thaw`; has no effect on a dead one."""
        self.life.is_running = False

    def thaw(self) -> None:
        """Run everything that became due meanwhile, in order."""
        if self.is_frozen:
            self.life.is_running = True
            held, self.life.held = self.life.held, []
            self._loop.resume(held)

    def kill(self) -> None:
        """Kill the process, as SIGKILL does: no task of it runs again, not even its clean-up."""
        self.life.is_alive = self.life.is_running = False
        self._buried += self._loop.tasks_of(self.life)
        self._tasks.clear()
        self.life.held.clear()

    def restart(self) -> None:
        """Prepare the machine for a new process; nothing of the old one remains."""
        self._begin_life()

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Unfinished tasks that were spawned here directly."""
        return [task for task in self._tasks if not task.done()]
