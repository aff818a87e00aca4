"""A trainer of collaboration.py with hivemind 1.1.12: the loop of its tutorials, with their settings.

``sync`` and ``local`` have the times of the quick start, ``delayed`` the options of the ALBERT example. Of the quick
start, ``sync`` lacks ``use_local_updates``.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from typing import Any

import hivemind
import torch
from _collaboration_task import Events, Role, Task, new_model, new_optimizer, train
from hivemind.averaging.control import StepControl
from hivemind.compression import Float16Compression

RUN = "collaboration"
FP16 = Float16Compression()
QUICK_START: dict[str, Any] = {"matchmaking_time": 3.0, "averaging_timeout": 10.0}
ALBERT: dict[str, Any] = {
    "matchmaking_time": 5.0, "averaging_timeout": 60.0,
    "grad_compression": FP16, "state_averaging_compression": FP16,
}  # fmt: skip
DELAYED: dict[str, Any] = {"offload_optimizer": True, "delay_optimizer_step": True, "delay_grad_averaging": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "sync": QUICK_START,
    "delayed": {**ALBERT, **DELAYED},
    "local": {**QUICK_START, "use_local_updates": True},
}
WAN_OPTIONS: dict[str, dict[str, Any]] = {
    "sync": ALBERT,
    "delayed": {**ALBERT, **DELAYED},
    "local": {**ALBERT, "use_local_updates": True},
}
"""A round of the quick start would often exceed its 10 s on slow lines."""


class Rounds:
    """Notes the rounds that count: those of gradients or, with local updates, those of parameters."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.optimizer: hivemind.Optimizer | None = None

    def next_step(self) -> int:
        return int(self.optimizer.local_epoch) + 1 if self.optimizer is not None else 1

    def began(self, control: StepControl, samples: int) -> None:
        step, frozen_at = self.next_step(), time.monotonic()

        def ended(round_: StepControl) -> None:
            if round_.cancelled() or round_.exception() is not None:
                self._events.write("failed", step=step)
            else:
                members = len(round_.result())
                self._events.write("step", step=step, contributed=samples, members=members, frozen_at=frozen_at)

        control.add_done_callback(ended)


class NotedGradientAverager(hivemind.optim.grad_averager.GradientAverager):  # type: ignore[misc]
    """Notes the samples that this peer brings to each round of gradients, and how the round ends."""

    def __init__(self, *args: Any, rounds: Rounds, **kwargs: Any) -> None:
        self._rounds = rounds
        super().__init__(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> StepControl:
        samples = self.local_samples_accumulated
        control = super().step(*args, **kwargs)
        self._rounds.began(control, samples)
        return control


class ParameterRounds(logging.Handler):
    """Notes the rounds of parameters from the log, as the optimizer has no hook for its averager of parameters."""

    def __init__(self, events: Events, system: Collaborative) -> None:
        super().__init__()
        self._events = events
        self._system = system

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        step = self._system.step_of_round
        if text.startswith("Averaged parameters with"):
            self._events.write(
                "step", step=step, contributed=self._system.samples_of_round, members=int(text.split()[3]),
                frozen_at=self._system.began_at,
            )  # fmt: skip
        elif text.startswith("Averaging failed with"):
            self._events.write("failed", step=step)


class Collaborative:
    """See `_collaboration_task.System`."""

    def __init__(self, task: Task, dht: hivemind.DHT, model: torch.nn.Module, events: Events) -> None:
        options = dict((WAN_OPTIONS if task.is_wan else OPTIONS)[task.mode])
        make = functools.partial(new_optimizer, learning_rate=task.learning_rate)
        if task.mode == "delayed":
            options |= {"optimizer": make, "params": list(model.parameters())}
        else:
            options["optimizer"] = make(model.parameters())
        self._is_local = task.mode == "local"
        rounds = Rounds(events)
        if not self._is_local:
            options["grad_averager_factory"] = functools.partial(NotedGradientAverager, rounds=rounds)
        self._batch = task.batch
        self.step_of_round, self.samples_of_round, self.began_at = 1, 0, time.monotonic()
        if self._is_local:
            logging.getLogger("hivemind.optim.state_averager").addHandler(ParameterRounds(events, self))
        self._optimizer = rounds.optimizer = hivemind.Optimizer(
            dht=dht, run_id=RUN, target_batch_size=task.target, batch_size_per_step=task.batch, verbose=True, **options
        )
        self._optimizer.load_state_from_peers()

    def step(self) -> int:
        before, began = int(self._optimizer.local_epoch), time.monotonic()
        samples = 0
        if self._is_local:
            samples = self._optimizer.tracker.local_progress.samples_accumulated + self._batch
        self._optimizer.step()
        step = int(self._optimizer.local_epoch)
        if step > before:  # the round of parameters has begun, in the background
            self.step_of_round, self.samples_of_round, self.began_at = step, samples, began
        return step


def main() -> None:
    role = Role.read(sys.argv[1])
    task = Task.read(role.task)
    torch.set_num_threads(1)
    events = Events(task.folder, role.rank)
    events.write("imported")
    dht = hivemind.DHT(initial_peers=role.initial_peers, host_maddrs=[f"/ip4/{role.host}/tcp/0"], start=True)
    events.write("addresses", addresses=[str(address) for address in dht.get_visible_maddrs()])
    if role.rank < 0:
        while True:
            time.sleep(1.0)
    model = new_model(task.folder)
    train(task, role, events, model, Collaborative(task, dht, model, events))


if __name__ == "__main__":
    main()
