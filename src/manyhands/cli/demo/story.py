"""The script of the demo: peers train together, one is killed, a fresh one joins, and all end in the same state."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from cyclopts import Parameter

from manyhands.base.errors import ConfigError, Timeout
from manyhands.cli.demo.child import Child, Lines, end_all
from manyhands.cli.demo.tally import Tally, TrainerTally
from manyhands.cli.demo.view import DemoView
from manyhands.cli.failing import CommandFailed
from manyhands.cli.options import Count
from manyhands.cli.output.event_file import EventFollower
from manyhands.cli.web_page import WebOptions
from manyhands.monitor.monitor_events import MonitorEvent
from manyhands.recipes.albert.trainer_events import TrainerEvent

RUN_ID = "demo"
LIAR = "liar"
Lie = Literal["sign-flip", "mean-flip"]
"""The lies of :data:`manyhands.testing.lies.LIES`, which imports torch."""
LEAST_WITH_LIAR = 3
MONITOR_EVENTS = "monitor.jsonl"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
MONITOR = "monitor"
"""Name of the monitor's process, and its command."""
LYING = "manyhands.cli.demo.liar"
"""The module that the lying trainer runs, in place of ``manyhands``. It does the same but for the lie."""
POLL_S = 0.1
START_TIMEOUT_S = 120.0
STALL_TIMEOUT_S = 180.0
"""Seconds without a new global step or sample after which the run counts as stuck."""

NEWCOMER_TIMEOUT_S = 120.0
FINISH_TIMEOUT_S = 90.0
LEAVE_TIMEOUT_S = 3.0
SLOW_DOWN = 2.0
SAFE_DISTANCE = 2
"""The last step is chosen this many global steps ahead, so that no trainer has passed it before it reads it."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The size and output of the demo."""

    peers: Count = 3
    """Trainers to start; the last of several is half as fast, or lies."""

    steps: Count = 8
    """Global steps to make; a few more when the newcomer needs them."""

    liar: Lie | None = None
    """The last trainer lies, and nobody is killed: with sign-flip it sends minus its gradient, with mean-flip minus the
    means that it computes for the others, from its fourth step on."""

    text: tuple[Path, ...] = ()
    """UTF-8 text files to train on."""

    target_batch_size: Count = 256
    """Samples of one global step, by all trainers together."""

    summary: Path | None = None
    """Write the outcome as JSON to this file."""

    web: WebOptions = WebOptions()

    def __post_init__(self) -> None:
        if self.liar is not None and self.peers < LEAST_WITH_LIAR:
            raise ConfigError(
                f"--peers is {self.peers} with --liar; one of two members can set any mean, so it must be at least "
                f"{LEAST_WITH_LIAR}"
            )


class Story:
    """Starts and watches the processes of one demo; :meth:`close` ends them.

    Args:
        folder: for the event files.
        tally: updated with the events of the processes.
        web: HOST:PORT of the page; None without one.
    """

    def __init__(
        self, options: DemoOptions, folder: Path, tally: Tally, view: DemoView, *, web: str | None = None
    ) -> None:
        self._options = options
        self._folder = folder
        self._tally = tally
        self._view = view
        self._web = web
        self._children: list[Child] = []
        self._lines: Lines = SimpleQueue()
        self._stop_file = folder / "stop"
        self._trainers: list[tuple[TrainerTally, Child, EventFollower[TrainerEvent]]] = []

    def run(self) -> None:
        """Run the demo to its end; the tally has the outcome.

        Raises:
            ConfigError: a process was started with a value that it refuses.
            CommandFailed: a process failed.
            Timeout: something did not happen in time.
        """
        num_peers = self._options.peers
        num_steps = self._options.steps
        lie = self._options.liar
        tally = self._tally
        self._start_monitor()
        for number in range(1, num_peers + (lie is None)):
            is_slow = number == num_peers and number > 1
            self._start_trainer(f"trainer {number}", slow_down=SLOW_DOWN if is_slow else 1.0)
        if lie is not None:
            self._start_trainer(LIAR, lie=lie)
        self._wait(
            lambda: all(trainer.joined is not None for trainer in tally.trainers), START_TIMEOUT_S, "for the trainers"
        )
        self._wait_for_step(max(num_steps // 2, 1))
        if lie is None:
            if num_peers > 1:
                self._kill_one()
            self._start_trainer("newcomer", is_newcomer=True)
            self._let_newcomer_contribute()
        tally.planned_steps = max(num_steps, tally.step + SAFE_DISTANCE)
        self._stop_file.write_text(str(tally.planned_steps))
        self._wait_for_step(tally.planned_steps)
        self._wait(
            lambda: all(trainer.finished is not None for trainer in tally.honest()),
            FINISH_TIMEOUT_S,
            "for the trainers' end",
        )

    def close(self) -> None:
        """End all processes that still run. May be called twice."""
        end_all(self._children, LEAVE_TIMEOUT_S)

    def _start_monitor(self) -> None:
        events = self._folder / MONITOR_EVENTS
        arguments = [MONITOR, "--run-id", RUN_ID, "--listen", LOOPBACK, "--events", str(events)]
        if self._web is not None:
            arguments += ["--web", self._web]
        self._monitor = self._start(MONITOR, arguments)
        self._monitor_events: EventFollower[MonitorEvent] = EventFollower(events, MonitorEvent)
        self._wait(lambda: bool(self._tally.addresses), START_TIMEOUT_S, "for the monitor")

    def _start_trainer(
        self, name: str, *, slow_down: float = 1.0, is_newcomer: bool = False, lie: Lie | None = None
    ) -> None:
        events = self._folder / f"{name.replace(' ', '-')}.jsonl"
        tally = TrainerTally(name, is_newcomer=is_newcomer, lie=lie or "")
        arguments = [
            "train", "--run-id", RUN_ID, "--name", name, "--initial-peers", *self._tally.addresses,
            "--listen", LOOPBACK, "--events", str(events), "--slow-down", str(slow_down), "--batch-size", "8",
            "--target-batch-size", str(self._options.target_batch_size), "--threads", "1", "--device", "cpu",
            "--stop-file", str(self._stop_file), "--no-checkpoints",
        ]  # fmt: skip
        if self._options.text:
            arguments += ["--text", *(str(path.resolve()) for path in self._options.text)]
        self._tally.trainers.append(tally)
        child = self._start(name, arguments) if lie is None else self._start(name, [lie, *arguments], LYING)
        self._trainers.append((tally, child, EventFollower(events, TrainerEvent)))

    def _start(self, name: str, arguments: list[str], module: str = "manyhands") -> Child:
        child = Child(name, arguments, self._folder, self._lines, module)
        self._children.append(child)
        return child

    def _kill_one(self) -> None:
        tally, child, _ = self._trainers[0]
        self._view.say("demo", f"half-way: {tally.name} is killed with SIGKILL, and a newcomer joins")
        tally.is_killed = True
        child.kill()

    def _let_newcomer_contribute(self) -> None:
        """Wait until the newcomer has contributed, past the planned number of steps if need be."""
        num_steps = self._options.steps
        self._wait(
            lambda: self._tally.has_newcomer_contributed or self._tally.step >= num_steps,
            STALL_TIMEOUT_S,
            f"for progress towards global step {num_steps}",
        )
        deadline = time.monotonic() + NEWCOMER_TIMEOUT_S
        while not self._tally.has_newcomer_contributed and time.monotonic() < deadline:
            self._look()
            time.sleep(POLL_S)

    def _wait_for_step(self, step: int) -> None:
        self._wait(lambda: self._tally.step >= step, STALL_TIMEOUT_S, f"for progress towards global step {step}")

    def _wait(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_done():
            if time.monotonic() > deadline:
                raise Timeout(f"waiting {what}", timeout_s)
            before = self._tally.samples_computed
            self._look()
            if self._tally.samples_computed != before:
                deadline = time.monotonic() + timeout_s
            time.sleep(POLL_S)

    def _look(self) -> None:
        """Process new output and events of the processes."""
        for _ in range(self._lines.qsize()):
            name, line = self._lines.get()
            if name == MONITOR or "Collaboration accumulated" not in line:  # the monitor logs it for all
                self._view.say(name, line)
        for monitor_event in self._monitor_events.read_new():
            self._tally.apply_monitor(monitor_event)
        for tally, _, events in self._trainers:
            for event in events.read_new():
                self._tally.apply_trainer(tally, event)
        self._view.refresh()
        for tally, child, _ in self._trainers:
            if child.exit_code is not None and not tally.is_killed and tally.finished is None:
                _raise_failure(child)
        if self._monitor.exit_code is not None:
            _raise_failure(self._monitor)


def _raise_failure(child: Child) -> None:
    """Raise the error of a process that ended early, with its last line."""
    message = child.last_line().removeprefix("manyhands: ")
    if child.exit_code == 2:
        raise ConfigError(message)
    raise CommandFailed(f"{child.name} ended with exit code {child.exit_code}: {message}")
