"""A deterministic world: hosts, a network, faults and invariants, all from one seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from manyhands.base.errors import ConfigError
from manyhands.base.identity import Identity
from manyhands.testing.faults import Fault
from manyhands.testing.host import Host
from manyhands.testing.network import SimNetwork, SimTransport
from manyhands.testing.trace import Trace
from manyhands.testing.virtual_loop import VirtualLoop

T = TypeVar("T")

Program = Callable[[Host], Coroutine[Any, Any, None]]
"""What a host's process runs, from its start to its end."""


class InvariantBroken(AssertionError):
    """Something that must hold at all times did not."""


class World:
    """Hosts that run programs over a simulated network in virtual time.

    ::

        world = World(seed=7)
        world.start("a", program); world.start("b", program)
        world.schedule(at(12.5).kill("b"))
        world.run(60)

    The same seed and the same programs give the same :attr:`trace`, in every process.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loop = VirtualLoop()
        self.trace = Trace()
        self.network = SimNetwork(self.loop, self.rng("network"), self.trace)
        self._programs: dict[str, Program] = {}
        self._invariants: list[tuple[str, Callable[[], bool]]] = []
        self._faults: list[Fault] = []
        self._failures: list[BaseException] = []
        self.loop.set_exception_handler(self._on_loop_error)

    def rng(self, purpose: str) -> random.Random:
        """A generator of its own for each purpose, from the world's seed."""
        return random.Random(f"{self.seed} {purpose}")

    def identity(self, name: str) -> Identity:
        """The identity of a host: the same for the same seed and name."""
        return Identity.from_seed(self.rng(f"identity of {name}").randbytes(32))

    def transport(self, host: Host) -> SimTransport:
        """The transport of a host's peer."""
        return SimTransport(self.network, host, self.identity(host.name))

    # before and while it runs

    def host(self, name: str) -> Host:
        """The host of this name; made when it is first asked for."""
        return self.network.hosts.get(name) or self.network.add_host(name)

    def start(self, name: str, program: Program) -> Host:
        """Run a program on a host; what it raises ends the world."""
        host = self.host(name)
        self._programs[name] = program
        self._launch(host)
        return host

    def schedule(self, *faults: Fault) -> None:
        """Let faults happen at their times."""
        for fault in faults:
            self._faults.append(fault)
            self.loop.call_at(fault.start_s, self._begin, fault)

    def invariant(self, name: str, holds: Callable[[], bool]) -> None:
        """``holds()`` must be true after every event of the network and every fault, and at the end."""
        self._invariants.append((name, holds))

    def run(self, duration_s: float) -> None:
        """Let the world go on for so many virtual seconds, or until all programs have ended; then it is over.

        Raises:
            InvariantBroken: with its name, the virtual time, and how to see it again.
            Exception: what a program raised.
        """
        self.loop.run(self._until(duration_s), limit_s=duration_s + 1.0)

    def story(self, main: Coroutine[Any, Any, T], limit_s: float = 3600.0) -> T:
        """Run a coroutine that stands outside of all hosts, and return its result; then the world is over."""
        return self.loop.run(self._watched(main), limit_s)

    async def _until(self, duration_s: float) -> None:
        deadline = self.loop.time() + duration_s
        while self.loop.time() < deadline and any(host.tasks() for host in self.network.hosts.values()):
            tasks = [task for host in self.network.hosts.values() for task in host.tasks()]
            await asyncio.wait(tasks, timeout=deadline - self.loop.time(), return_when=asyncio.FIRST_COMPLETED)
            self.check()
        self.check()

    async def _watched(self, main: Coroutine[Any, Any, T]) -> T:
        result = await main
        self.check()
        return result

    def check(self) -> None:
        """Raise what went wrong so far."""
        if self._failures:
            raise self._failures[0]
        for name, holds in self._invariants:
            if not holds():
                schedule = "; ".join(str(fault) for fault in self._faults) or "no faults"
                raise InvariantBroken(
                    f"{name} does not hold at {self.loop.time():.6f} s with seed {self.seed} ({schedule})"
                )

    # faults

    def kill(self, name: str) -> None:
        host = self._known(name)
        host.kill()
        self.network.died(host)

    def restart(self, name: str) -> None:
        host = self._known(name)
        if host.is_alive:
            raise ConfigError(f"host {name!r} is alive; kill it before it is restarted")
        host.restart()
        self._launch(host)

    def freeze(self, name: str) -> None:
        self._known(name).freeze()

    def thaw(self, name: str) -> None:
        self._known(name).thaw()

    def block(self, pairs: Iterable[tuple[str, str]]) -> None:
        for source, destination in pairs:
            self.network.block(self._known(source).name, self._known(destination).name)

    def unblock(self, pairs: Iterable[tuple[str, str]]) -> None:
        for source, destination in pairs:
            self.network.unblock(source, destination)

    def set_clock(self, name: str, skew_s: float) -> None:
        self._known(name).skew_s = skew_s

    def _known(self, name: str) -> Host:
        if name not in self.network.hosts:
            names = ", ".join(self.network.hosts) or "there are none yet"
            raise ConfigError(f"no host is called {name!r}; the hosts are: {names}")
        return self.network.hosts[name]

    def _begin(self, fault: Fault) -> None:
        self._do(str(fault), fault.begin)
        if fault.stop_s is not None and fault.undo is not None:
            self.loop.call_at(fault.stop_s, self._do, f"end of {fault}", fault.undo)
        if fault.every_s is not None:
            self.loop.call_later(fault.every_s, self._begin, fault)

    def _do(self, text: str, action: Callable[[World], None]) -> None:
        self.trace.add(self.loop.time(), text)
        try:
            action(self)
            self.check()
        except Exception as error:  # noqa: BLE001 (raised by whoever runs the world)
            self._failures.append(error)

    def _launch(self, host: Host) -> None:
        host.spawn(self._supervise(host), name=f"program of {host.name}")

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._failures.append(error if isinstance(error, BaseException) else RuntimeError(str(context["message"])))

    async def _supervise(self, host: Host) -> None:
        try:
            await self._programs[host.name](host)
        except Exception as error:  # noqa: BLE001 (raised by whoever runs the world)
            self._failures.append(error)
