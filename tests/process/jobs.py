"""Jobs of several ranks over gloo, as processes of their own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.process.commands import Command

CHILD = """
import importlib, sys
module, function, rank, store = sys.argv[1:5]
from tests.process.jobs import be_a_rank
be_a_rank(getattr(importlib.import_module(module), function), int(rank), store, sys.argv[5:])
"""
NUM_RANKS = 2


def be_a_rank(function: Any, rank: int, store: str, arguments: list[str]) -> None:
    """What a process of a job does: ``function(rank, *arguments)`` in a process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    function(rank, *arguments)
    dist.destroy_process_group()


def say(**facts: Any) -> None:
    """One line for :meth:`Job.hear`."""
    print("SAYS", json.dumps(facts), flush=True)


class Job:
    """Two processes, by rank."""

    def __init__(self, function: Any, store: Path, arguments: Sequence[str]) -> None:
        head = ["-c", CHILD, function.__module__, function.__name__]
        self.ranks = [Command([*head, str(rank), str(store), *arguments], module=None) for rank in range(NUM_RANKS)]

    def hear(self) -> list[dict[str, Any]]:
        """What each rank says next."""
        return [json.loads(command.wait_for("SAYS").split("SAYS")[1]) for command in self.ranks]

    def wait(self) -> list[int]:
        """The exit codes."""
        return [command.wait() for command in self.ranks]


@contextmanager
def job(function: Any, folder: Path, *arguments: str) -> Iterator[Job]:
    store = Path(tempfile.mkdtemp(dir=folder)) / "store"
    running = Job(function, store, arguments)
    try:
        yield running
    finally:
        for command in running.ranks:
            command.close()
