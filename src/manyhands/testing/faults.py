"""A small language for fault schedules in tests::

    world.schedule(
        at(12.5).kill("c"),
        at(20).restart("c"),
        between(3, 9).partition({"a", "b"}, {"c"}),
        every(30).reset("a", "b"),
    )

Times are virtual seconds. A fault ``between`` two times is undone at the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.base.errors import ConfigError

if TYPE_CHECKING:
    from manyhands.testing.world import World

Action = Callable[["World"], None]


@dataclass(frozen=True)
class Fault:
    """One entry of a schedule.

    Attributes:
        text: as written in the schedule.
        start_s, stop_s: when it begins and when it is undone; no stop means never.
        every_s: repetition period.
        begin, undo: the actions.
    """

    text: str
    start_s: float
    stop_s: float | None
    every_s: float | None
    begin: Action
    undo: Action | None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class When:
    """A time or a span, whose methods make faults."""

    text: str
    start_s: float
    stop_s: float | None = None
    every_s: float | None = None

    def kill(self, name: str) -> Fault:
        """Kill the process of a host, as SIGKILL does."""
        return self._fault(f"kill({name!r})", lambda world: world.kill(name))

    def crash(self, name: str) -> Fault:
        """Cut the power of a machine: its connections stay half-open at their other ends."""
        return self._fault(f"crash({name!r})", lambda world: world.crash(name))

    def restart(self, name: str) -> Fault:
        """Start a killed process again with the program of its host."""
        return self._fault(f"restart({name!r})", lambda world: world.restart(name))

    def freeze(self, name: str) -> Fault:
        """Stop a process, as SIGSTOP does; its machine keeps running."""
        return self._fault(f"freeze({name!r})", lambda world: world.freeze(name), lambda world: world.thaw(name))

    def thaw(self, name: str) -> Fault:
        """Resume a frozen process."""
        return self._fault(f"thaw({name!r})", lambda world: world.thaw(name))

    def partition(self, some: Iterable[str], others: Iterable[str]) -> Fault:
        """Block all traffic between two sets of hosts, in both directions."""
        left = sorted(some)
        right = sorted(others)
        pairs = [(a, b) for a in left for b in right]
        pairs += [(b, a) for a, b in pairs]
        text = f"partition({set_text(left)}, {set_text(right)})"
        return self._fault(text, lambda world: world.block(pairs), lambda world: world.unblock(pairs))

    def cut(self, source: str, destination: str) -> Fault:
        """Block all traffic from one host to another; the other direction stays open."""
        pairs = [(source, destination)]
        text = f"cut({source!r}, {destination!r})"
        return self._fault(text, lambda world: world.block(pairs), lambda world: world.unblock(pairs))

    def reset(self, one: str, other: str) -> Fault:
        """Reset all connections between two hosts."""
        return self._fault(f"reset({one!r}, {other!r})", lambda world: world.network.reset(one, other))

    def half_open(self, one: str, other: str) -> Fault:
        """Silence all connections between two hosts; neither end is notified."""
        return self._fault(f"half_open({one!r}, {other!r})", lambda world: world.network.half_open(one, other))

    def reboot_router(self, name: str) -> Fault:
        """Have the router of a host forget its connections; neither end is notified."""
        return self._fault(f"reboot_router({name!r})", lambda world: world.network.reboot_router(name))

    def move(self, name: str, ip: str) -> Fault:
        """Give a host another address; its connections go silent, and neither end is notified."""
        return self._fault(f"move({name!r}, {ip!r})", lambda world: world.network.move(name, ip))

    def clock(self, name: str, seconds: float) -> Fault:
        """Move a host's wall clock by ``seconds`` (backward if negative), and back at the end of a ``between``."""
        return self._fault(
            f"clock({name!r}, {seconds:g})",
            lambda world: world.move_clock(name, seconds),
            lambda world: world.move_clock(name, -seconds),
        )

    def call(self, action: Callable[[], None]) -> Fault:
        """Call a function."""
        return self._fault(f"call({getattr(action, '__name__', 'action')})", lambda world: action())

    def _fault(self, what: str, begin: Action, undo: Action | None = None) -> Fault:
        if self.stop_s is not None and undo is None:
            raise ConfigError(f"{self.text}.{what}: this fault cannot be undone; write at({self.start_s:g}) instead")
        return Fault(f"{self.text}.{what}", self.start_s, self.stop_s, self.every_s, begin, undo)


def at(time_s: float) -> When:
    """Once, at a virtual time."""
    return When(f"at({time_s:g})", _checked(time_s))


def between(start_s: float, stop_s: float) -> When:
    """From one virtual time to another."""
    if not _checked(start_s) < stop_s:
        raise ConfigError(f"between({start_s:g}, {stop_s:g}): the second time must be later, as in between(3, 9)")
    return When(f"between({start_s:g}, {stop_s:g})", start_s, stop_s)


def every(period_s: float) -> When:
    """Periodically, first after one period."""
    if not _checked(period_s) > 0:
        raise ConfigError(f"every({period_s:g}): the period must be above 0, as in every(30)")
    return When(f"every({period_s:g})", period_s, None, period_s)


def set_text(names: Iterable[str]) -> str:
    """A set as written in a schedule."""
    return "{" + ", ".join(repr(name) for name in names) + "}"


def _checked(time_s: float) -> float:
    if not 0 <= time_s < float("inf"):
        raise ConfigError(f"{time_s} is not a virtual time; it must be >= 0 and finite, as in at(12.5)")
    return time_s
