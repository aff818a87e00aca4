"""What the trainers of both systems in collaboration.py share: the task, the pace, and the log of events.

A trainer imports torch, transformers and its own system, and nothing of the other one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """What all trainers of a run do; a file in the folder of the run.

    Attributes:
        folder: has the model, the data and, later, the logs of the run.
        mode: ``sync``, ``delayed`` or ``local``.
        target: samples of a global step.
        batch: samples of a batch.
        learning_rate: of AdamW.
        is_wan: slow lines between the peers.
        keeper: rank of the trainer that writes its parameters down at each global step of ``kept_steps``.
        kept_steps: it keeps each step whose number can be divided by this.
    """

    folder: str
    mode: str
    target: int
    batch: int
    learning_rate: float
    is_wan: bool
    keeper: int
    kept_steps: int

    def write(self) -> Path:
        path = Path(self.folder) / "task.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: str) -> Task:
        return cls(**json.loads(Path(path).read_text()))


@dataclass(frozen=True)
class Role:
    """Of one process; given as JSON on its command line.

    Attributes:
        rank: -1 for the first peer, which computes nothing.
        host: IP address to listen at.
        initial_peers: addresses; none for the first peer.
        pace_s: of a batch.
    """

    task: str
    rank: int
    host: str
    initial_peers: list[str]
    pace_s: float

    @classmethod
    def read(cls, text: str) -> Role:
        return cls(**json.loads(text))


class Events:
    """Writes events as JSON lines; the time is that of the monotonic clock, which all processes of a machine share."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file = events_path(folder, rank).open("a", buffering=1)

    def write(self, kind: str, **facts: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "at": time.monotonic(), **facts}) + "\n")


def events_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"events-{rank}.jsonl"


class System(Protocol):
    """The collaborative optimizer of one system."""

    def step(self) -> int:
        """Count the batch whose gradients the model has; returns the number of the global step after it.

        Writes what happened to the events: ``step`` with its number, ``contributed`` samples of this trainer, the
        number of ``members`` of the round (None if unknown) and ``frozen_at``, the time after which a batch counts in
        another step; ``failed`` with the number of the step whose round failed.
        """


def new_model(folder: str) -> torch.nn.Module:
    """The model with the initial parameters of the run."""
    config = transformers.AlbertConfig.from_dict(json.loads((Path(folder) / "model.json").read_text()))
    model: torch.nn.Module = transformers.AlbertForPreTraining(config)
    model.load_state_dict(torch.load(Path(folder) / "initial.pt"))
    model.train()
    return model


def new_optimizer(parameters: Any, learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=learning_rate)


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def batches_of(folder: str, rank: int, size: int) -> Iterator[Batch]:
    """The batches of one trainer, again and again."""
    data = torch.load(Path(folder) / f"batches-{rank}.pt")
    total = len(data["input_ids"]) // size
    while True:
        for number in range(total):
            yield {name: values[number * size : (number + 1) * size].long() for name, values in data.items()}


def flat(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([parameter.flatten() for parameter in model.parameters()])


def kept_path(folder: str, step: int) -> Path:
    return Path(folder) / f"parameters-{step}.pt"


def train(task: Task, role: Role, events: Events, model: torch.nn.Module, system: System) -> None:
    """Compute batches at the pace of the role until the process is told to end."""
    step = 0
    keep: Callable[[], None] | None = None
    for batch in batches_of(task.folder, role.rank, task.batch):
        began = time.monotonic()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        gradients_s = time.monotonic() - began
        if keep is not None:  # within the time of the batch: it must not slow the run down
            keep()
            keep = None
        time.sleep(max(0.0, began + role.pace_s - time.monotonic()))
        computed = time.monotonic()
        before, step = step, system.step()
        returned = time.monotonic()
        model.zero_grad()
        events.write("batch", began=began, gradients_s=gradients_s, computed=computed, returned=returned)
        if role.rank == task.keeper and step > before and step % task.kept_steps == 0:
            copy, path = flat(model), kept_path(task.folder, step)

            def keep(copy: torch.Tensor = copy, path: Path = path) -> None:
                torch.save(copy, path)
