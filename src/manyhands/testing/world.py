"""A deterministic simulation: hosts, a network, faults and invariants, all from one seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from manyhands.base.errors import ConfigError
from manyhands.base.identity import Identity
from manyhands.testing.faults import Fault
from manyhands.testing.host import Host, HostLife
from manyhands.testing.leaks import left_by, unread_in
from manyhands.testing.network import SimNetwork, SimTransport
from manyhands.testing.trace import Trace
from manyhands.testing.verdicts import each_signature_once
from manyhands.testing.virtual_loop import Deadlock, VirtualLoop, VirtualTimeout

T = TypeVar("T")

Program = Callable[[Host], Coroutine[Any, Any, None]]
"""The program of a host's process, from start to end."""


class InvariantBroken(AssertionError):
    """An invariant of the world does not hold."""


class Leaked(AssertionError):
    """A program ended and left something open, or received bytes are never read."""


def _no_details() -> str:
    return ""


class World:
    """Hosts that run programs over a simulated network in virtual time.

    ::

        world = World(seed=7)
        world.start("a", program); world.start("b", program)
        world.schedule(at(12.5).kill("b"))
        world.run(60)

    The same seed and the same programs give the same :attr:`trace`, in every process. A program must close everything
    that it opens before it returns, otherwise the world ends with :class:`Leaked`.

    Args:
        seed: of all randomness.
        executor_cost_s: virtual seconds that a job of ``run_in_executor`` takes, by its function.
    """

    def __init__(self, seed: int, executor_cost_s: Callable[[Callable[..., Any]], float] = lambda job: 0.001) -> None:
        self.seed = seed
        self.loop = VirtualLoop(executor_cost_s)
        self.trace = Trace()
        self.network = SimNetwork(self.loop, self.rng("network"), self.trace)
        self._programs: dict[str, Program] = {}
        self._invariants: list[tuple[str, Callable[[], bool], Callable[[], object]]] = []
        self._faults: list[Fault] = []
        self._failures: list[BaseException] = []
        self._conclusions: list[Callable[[], None]] = []
        self._returned: list[tuple[Host, HostLife]] = []
        self._events_seen = 0
        self.loop.set_exception_handler(self._on_loop_error)

    def rng(self, purpose: str) -> random.Random:
        """A random generator for one purpose, derived from the world's seed."""
        return random.Random(f"{self.seed} {purpose}")

    def identity(self, name: str) -> Identity:
        """The identity of a host: the same for the same seed and name."""
        return Identity.from_seed(self.rng(f"identity of {name}").randbytes(32))

    def transport(self, host: Host) -> SimTransport:
        """The transport of a host's peer."""
        return SimTransport(self.network, host, self.identity(host.name))

    # before and during the run

    def host(self, name: str) -> Host:
        """The host of this name; created on first use."""
        return self.network.hosts.get(name) or self.network.add_host(name)

    def start(self, name: str, program: Program) -> Host:
        """Run a program on a host; an exception in it ends the world."""
        host = self.host(name)
        self._programs[name] = program
        self._launch(host)
        return host

    def schedule(self, *faults: Fault) -> None:
        """Add faults to the schedule."""
        for fault in faults:
            self._faults.append(fault)
            self.loop.call_at(fault.start_s, self._begin, fault)

    def schedule_text(self) -> str:
        """The fault schedule as written."""
        return "; ".join(str(fault) for fault in self._faults) or "no faults"

    def invariant(self, name: str, holds: Callable[[], bool], details: Callable[[], object] = _no_details) -> None:
        """Require that ``holds()`` is true after every event and everything that it led to, and at the end.

        Events are arriving bytes, streams that open or close, faults, and timers of programs. Make the check cheap, as
        there are many. If the invariant is broken, the result of ``details()`` is shown.
        """
        self._invariants.append((name, holds, details))
        self.loop.on_settled = self.check

    def at_end(self, conclude: Callable[[], None]) -> None:
        """Call ``conclude()`` when the time of :meth:`run` is over, before the programs are told to stop."""
        self._conclusions.append(conclude)

    def run(self, duration_s: float, stop_within_s: float | None = None) -> None:
        """Run the world for ``duration_s`` virtual seconds, or until all programs have ended; it cannot run again.

        Args:
            stop_within_s: programs that still run at the end are cancelled, as by SIGTERM, and must return within this
                many seconds without leaks. Frozen and dead hosts are exempt. None ends the world at once.
        Raises:
            InvariantBroken: with its name, the virtual time, the event, and how to reproduce it.
            Leaked: a program left something open, or did not read something.
            Deadlock: programs wait for something that can never happen; lists them. A program with an open port may
                wait for ever.
            Exception: an exception of a program.
        """
        with self._alive():
            self._go_on(self.loop.now + duration_s)
            self.check()
            for conclude in self._conclusions:
                conclude()
            if stop_within_s is not None:
                self._stop(stop_within_s)
            self.check()
            if unread := unread_in(self.network):
                raise Leaked(self._explained("; ".join(unread)))

    def story(self, main: Coroutine[Any, Any, T], limit_s: float = 3600.0) -> T:
        """Run a coroutine outside of all hosts, and return its result; the world cannot run again."""
        with self._alive():
            result = self.loop.advance(main, limit_s)
            self.check()
        return result

    @contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            with each_signature_once():
                yield
        finally:
            self.loop.end()
            self.trace.flush()

    def _go_on(self, end_s: float) -> None:
        try:
            self.loop.advance(self._programs_end(), end_s)
        except VirtualTimeout:
            self.loop.now = end_s
        except Deadlock:
            if any(not self._serves(host) for host in self.network.hosts.values() if host.tasks()):
                raise
            self.loop.now = end_s

    def _serves(self, host: Host) -> bool:
        return any(listener.host is host for listener in self.network.listeners.values())

    def _stop(self, within_s: float) -> None:
        stopping = [task for host in self.network.hosts.values() if not host.is_frozen for task in host.tasks()]
        names = "; ".join(task.get_name() for task in stopping)
        for task in stopping:
            task.cancel()
        try:
            self.loop.advance(self._programs_end(stopping), self.loop.now + within_s)
        except (VirtualTimeout, Deadlock) as error:
            raise Leaked(self._explained(f"told to stop: {names}; after {within_s:g} s: {error}")) from error

    async def _programs_end(self, tasks: Iterable[asyncio.Task[Any]] | None = None) -> None:
        """Wait for all programs, including those that faults start meanwhile, or for some of them."""
        while waiting := [task for host in self.network.hosts.values() for task in host.tasks()]:
            if tasks is not None and not (waiting := [task for task in tasks if not task.done()]):
                break
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    def check(self) -> None:
        """Raise the first error so far."""
        if self._failures:
            raise self._failures[0]
        for name, holds, details in self._invariants:
            if not holds():
                shown = f" ({text})" if (text := str(details())) else ""
                raise InvariantBroken(self._explained(f"{name} does not hold after {self._last_event()}{shown}"))
        self._events_seen = self.trace.num_events
        while self._returned:
            host, life = self._returned.pop()
            if host.life is life and life.is_alive and (left := left_by(host, self.loop, self.network)):
                raise Leaked(self._explained(f"the program of {host.name} has ended and left: " + "; ".join(left)))
        if not self._invariants:
            self.loop.on_settled = None  # no cost without invariants

    def _explained(self, what: str) -> str:
        return f"{what}, at {self.loop.now:.6f} s with seed {self.seed} ({self.schedule_text()})"

    def _last_event(self) -> str:
        if self.trace.num_events > self._events_seen:
            return f"“{self.trace.lines[-1].partition(' ')[2]}”"
        timer = self.loop.last_timer
        return f"a timer of {timer.life}" if timer is not None and timer.life is not None else "the start"

    # faults

    def kill(self, name: str) -> None:
        """Kill the process of a host, as SIGKILL does; its machine closes the connections."""
        host = self._known(name)
        host.kill()
        self.network.died(host)

    def crash(self, name: str) -> None:
        """Cut the power of a host; its connections stay half-open at their other ends."""
        host = self._known(name)
        host.kill()
        self.network.vanished(host)

    def restart(self, name: str) -> None:
        """Start the program of a dead host anew."""
        host = self._known(name)
        if host.is_alive:
            raise ConfigError(f"host {name!r} is alive; kill it before it is restarted")
        host.restart()
        self._launch(host)

    def freeze(self, name: str) -> None:
        """Stop the process of a host, as SIGSTOP does; bytes still arrive."""
        self._known(name).freeze()

    def thaw(self, name: str) -> None:
        """Let a frozen process go on, as SIGCONT does."""
        self._known(name).thaw()

    def block(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Block all traffic from the first host of each pair to the second."""
        for source, destination in pairs:
            self.network.block(self._known(source).name, self._known(destination).name)

    def unblock(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Remove the blocks; what was sent meanwhile arrives."""
        for source, destination in pairs:
            self.network.unblock(source, destination)

    def move_clock(self, name: str, seconds: float) -> None:
        """Move the wall clock of a host forward; backward if ``seconds`` is negative."""
        self._known(name).skew_s += seconds

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
        self.trace.add(self.loop.now, text)
        try:
            action(self)
        except Exception as error:  # noqa: BLE001 (the method that runs the world raises it)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failures.append(error)
        self.loop.on_settled = self.check

    def _launch(self, host: Host) -> None:
        host.spawn(self._supervise(host), name=f"program of {host.name}")

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._fail(error if isinstance(error, BaseException) else RuntimeError(str(context["message"])))

    async def _supervise(self, host: Host) -> None:
        try:
            await self._programs[host.name](host)
        except Exception as error:  # noqa: BLE001 (the method that runs the world raises it)
            self._fail(error)
        finally:
            self._returned.append((host, host.life))
            self.loop.on_settled = self.check
