"""A trainer of collaboration.py with manyhands: the loop of the tutorial, with default settings."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from _collaboration_task import Events, Role, Task, new_model, new_optimizer, train

import manyhands

RUN = "collaboration"
OPTIONS: dict[str, dict[str, Any]] = {
    "sync": {},
    "delayed": {"delay": "gradients"},
    "local": {"local_steps": manyhands.LocalSteps()},
}


class Collaborative:
    """See `_collaboration_task.System`."""

    def __init__(self, task: Task, peer: manyhands.Peer, model: torch.nn.Module, events: Events) -> None:
        self._events = events
        self._optimizer = manyhands.Optimizer(
            new_optimizer(model.parameters(), task.learning_rate),
            peer=peer,
            run_id=RUN,
            target_batch_size=task.target,
            batch_size_per_step=task.batch,
            **OPTIONS[task.mode],
        )
        self._frozen_at: float | None = None  # of the step in the background, if there is one

    def step(self) -> int:
        optimizer = self._optimizer
        before, failed = optimizer.global_step, optimizer.statistics.rounds_aborted
        began = time.monotonic()
        optimizer.step()
        step = optimizer.global_step
        has_failed = optimizer.statistics.rounds_aborted > failed
        if has_failed:
            self._events.write("failed", step=before + 1)
        if step > before:
            manifest = optimizer.last_round
            self._events.write(
                "step", step=step, contributed=optimizer.last_contribution,
                members=len(manifest.members) if manifest is not None else None,
                frozen_at=self._frozen_at if self._frozen_at is not None else began,
            )  # fmt: skip
        if step > before or has_failed:
            self._frozen_at = None
        if optimizer.is_stepping and self._frozen_at is None:
            self._frozen_at = began
        return step


def main() -> None:
    role = Role.read(sys.argv[1])
    task = Task.read(role.task)
    torch.set_num_threads(1)
    events = Events(task.folder, role.rank)
    events.write("imported")
    with manyhands.Peer(role.initial_peers, listen=[f"/ip4/{role.host}/tcp/0"]) as peer:
        events.write("addresses", addresses=peer.addresses)
        if role.rank < 0:
            while True:
                time.sleep(1.0)
        model = new_model(task.folder)
        train(task, role, events, model, Collaborative(task, peer, model, events))


if __name__ == "__main__":
    main()
