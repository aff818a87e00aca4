"""The script of the demo: peers train together, one is killed, a fresh one joins, and all end in the same state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from manyhands.base.errors import ConfigError, Timeout
from manyhands.cli.demo.child import Child
from manyhands.cli.demo.tally import Tally, TrainerTally
from manyhands.cli.demo.view import DemoView
from manyhands.cli.failing import CommandFailed
from manyhands.cli.output.event_file import EventFollower
from manyhands.monitor.events import MonitorEvent
from manyhands.recipes.albert.events import TrainerEvent

RUN_ID = "demo"
MONITOR_EVENTS = "monitor.jsonl"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PAGE = "The page of the run: "
"""In a line of the monitor, before its address."""
POLL_S = 0.1
START_TIMEOUT_S = 120.0
STALL_TIMEOUT_S = 180.0
"""The run is considered stuck after this long without a new global step or sample."""

NEWCOMER_TIMEOUT_S = 120.0
FINISH_TIMEOUT_S = 90.0
SLOW_DOWN = 2.0
SAFE_DISTANCE = 2
"""Global steps between choosing the last step and making it, so that no trainer has passed it before it is told."""


class Story:
    """Starts and watches the processes of one demo.

    Args:
        children: every started process is appended here; the owner of the list ends them.
        folder: for the event files.
        web: address of the page, if there is to be one.
    """

    def __init__(
        self,
        children: list[Child],
        folder: Path,
        view: DemoView,
        *,
        num_peers: int,
        num_steps: int,
        target_batch_size: int,
        text: Sequence[Path],
        web: str | None,
    ) -> None:
        self.tally = Tally(planned_steps=num_steps)
        self._children = children
        self._folder = folder
        self._view = view
        self._num_peers = num_peers
        self._num_steps = num_steps
        self._web = web
        self._stop_file = folder / "stop"
        self._trainer_arguments = [
            "--target-batch-size", str(target_batch_size), "--threads", "1", "--device", "cpu",
            "--batch-size", "8", "--stop-file", str(self._stop_file), "--no-checkpoints",
        ]  # fmt: skip
        if text:
            self._trainer_arguments += ["--text", *(str(path.resolve()) for path in text)]
        self._trainers: list[tuple[TrainerTally, Child, EventFollower[TrainerEvent]]] = []

    def run(self) -> None:
        """Run the demo to its end; :attr:`tally` has the outcome.

        Raises:
            ConfigError: a process was started with a value that it refuses.
            CommandFailed: a process failed.
            Timeout: something did not happen in time.
        """
        self._start_monitor()
        for number in range(1, self._num_peers + 1):
            is_slow = number == self._num_peers and number > 1
            self._start_trainer(f"trainer {number}", slow_down=SLOW_DOWN if is_slow else 1.0)
        half = max(self._num_steps // 2, 1)
        self._wait(
            lambda: all(trainer.joined is not None for trainer in self.tally.trainers),
            START_TIMEOUT_S,
            "for the trainers",
        )
        self._wait(lambda: self.tally.step >= half, STALL_TIMEOUT_S, f"for progress towards global step {half}")
        if self._num_peers > 1:
            self._kill_one()
        self._start_trainer("newcomer", is_newcomer=True)
        self._let_newcomer_contribute()
        stop_step = max(self._num_steps, self.tally.step + SAFE_DISTANCE)
        self.tally.planned_steps = stop_step
        self._write_stop(stop_step)
        self._wait(
            lambda: self.tally.step >= stop_step, STALL_TIMEOUT_S, f"for progress towards global step {stop_step}"
        )
        self._wait(
            lambda: all(trainer.finished is not None for trainer in self.tally.alive()),
            FINISH_TIMEOUT_S,
            "for the trainers' end",
        )

    def _start_monitor(self) -> None:
        events = self._folder / MONITOR_EVENTS
        arguments = ["monitor", "--run-id", RUN_ID, "--listen", LOOPBACK, "--events", str(events)]
        if self._web is not None:
            arguments += ["--web", self._web]
        self._monitor = Child("monitor", arguments, self._folder)
        self._children.append(self._monitor)
        self._monitor_events: EventFollower[MonitorEvent] = EventFollower(events, MonitorEvent)
        self._wait(lambda: bool(self.tally.addresses), START_TIMEOUT_S, "for the monitor")

    def _start_trainer(self, name: str, *, slow_down: float = 1.0, is_newcomer: bool = False) -> None:
        events = self._folder / f"{name.replace(' ', '-')}.jsonl"
        tally = TrainerTally(name, is_newcomer=is_newcomer)
        arguments = [
            "train", "--run-id", RUN_ID, "--name", name, "--initial-peers", *self.tally.addresses, "--listen", LOOPBACK,
            "--events", str(events), "--slow-down", str(slow_down), *self._trainer_arguments,
        ]  # fmt: skip
        child = Child(name, arguments, self._folder)
        self._children.append(child)
        self.tally.trainers.append(tally)
        self._trainers.append((tally, child, EventFollower(events, TrainerEvent)))

    def _kill_one(self) -> None:
        tally, child, _ = self._trainers[0]
        self._view.say("demo", f"half-way: {tally.name} is killed with SIGKILL, and a newcomer joins")
        tally.is_killed = True
        child.kill()

    def _let_newcomer_contribute(self) -> None:
        """Wait until the newcomer has contributed, past the planned number of steps if need be."""
        self._wait(
            lambda: self.tally.has_newcomer_contributed or self.tally.step >= self._num_steps,
            STALL_TIMEOUT_S,
            f"for progress towards global step {self._num_steps}",
        )
        deadline = time.monotonic() + NEWCOMER_TIMEOUT_S
        while not self.tally.has_newcomer_contributed and time.monotonic() < deadline:
            self._look()
            time.sleep(POLL_S)

    def _write_stop(self, step: int) -> None:
        self._stop_file.write_text(str(step))

    def _wait(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_done():
            if time.monotonic() > deadline:
                raise Timeout(f"waiting {what}", timeout_s)
            before = self.tally.samples_computed
            self._look()
            if self.tally.samples_computed != before:
                deadline = time.monotonic() + timeout_s
            time.sleep(POLL_S)

    def _look(self) -> None:
        """Process new output and events of the processes."""
        for child in self._children:
            for line in child.take_new_lines():
                if child is self._monitor and PAGE in line:
                    self.tally.page = line.partition(PAGE)[2].strip()
                if child is self._monitor or "Collaboration accumulated" not in line:  # the monitor logs it for all
                    self._view.say(child.name, line)
        for monitor_event in self._monitor_events.read_new():
            self.tally.apply_monitor(monitor_event)
        for tally, _, events in self._trainers:
            for event in events.read_new():
                self.tally.apply_trainer(tally, event)
        self._view.refresh(self.tally)
        for tally, child, _ in self._trainers:
            if child.exit_code is not None and not tally.is_killed and tally.finished is None:
                _raise_failure(child)
        if self._monitor.exit_code is not None:
            _raise_failure(self._monitor)


def _raise_failure(child: Child) -> None:
    """Raise the error of a process that ended early, with its last line."""
    words = child.last_line().removeprefix("manyhands: ")
    if child.exit_code == 2:
        raise ConfigError(words)
    raise CommandFailed(f"{child.name} ended with exit code {child.exit_code}: {words}")
