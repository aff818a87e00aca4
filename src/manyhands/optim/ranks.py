"""Messages between the ranks of a ``torch.distributed`` job that are one peer together.

All ranks make each call of the optimizer. Rank 0 gathers their batches, acts, and broadcasts the result; if that takes
long, it sends periodic signs of life. The messages have a gloo group of their own: they wait for no GPU, and when a
rank dies its sockets close, which all others notice at once.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from manyhands.base.errors import ConfigError, RankLost
from manyhands.optim.health import Statistics

logger = logging.getLogger(__name__)

PATIENCE_S = 1800.0
"""Timeout of a wait for another rank, which may be evaluating, say; torch's default."""
AT_WORK_S = 60.0
"""The period of rank 0's sign of life, which is None, while it downloads the state of a run, say."""


class Ranks:
    """The ranks of the default process group, as seen by one of them.

    Attributes:
        rank, num_ranks: of this process, and their number.
    Raises:
        ConfigError: there is no process group.
        RankLost: another rank does not come.
    """

    def __init__(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "there are no ranks: start the program with torchrun --nproc-per-node N, and call "
                "torch.distributed.init_process_group() first; a process by itself needs manyhands.Optimizer only"
            )
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        with self._lost("to begin"):
            self._words = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
        self._turn = threading.Lock()  # one word at a time

    def compare(self, own: Any) -> list[Any]:
        """Exchange one value of each rank; returns all of them by rank, on all ranks."""
        said: list[Any] = [None] * self.num_ranks
        with self._lost("to begin"):
            dist.all_gather_object(said, own, group=self._words)
        return said

    def gather(self, numbers: Sequence[float | None]) -> list[list[float | None]]:
        """Gather equally many numbers of each rank, by rank, on rank 0; the others get nothing and go on at once."""
        own = torch.tensor([[number is not None, number or 0] for number in numbers], dtype=torch.float64, device="cpu")
        said = [torch.empty_like(own) for _ in range(self.num_ranks)] if self.rank == 0 else None
        with self._lost("to come to the same call"):
            dist.gather(own, said, dst=0, group=self._words)
        return [[number if is_given else None for is_given, number in row.tolist()] for row in said or []]

    def tell(self, word: Any) -> None:
        """Send a word, which can be pickled and is not None, from rank 0 to all others."""
        with self._turn, self._lost("to hear rank 0"):
            dist.broadcast_object_list([word], src=0, group=self._words)

    def hear(self) -> Any:
        """Wait for a word of rank 0."""
        said: list[Any] = [None]
        while said[0] is None:
            with self._lost("that is rank 0"):
                dist.broadcast_object_list(said, src=0, group=self._words)
        return said[0]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within the block, rank 0 sends periodic signs of life to the others."""
        over = threading.Event()

        def reassure() -> None:
            while not over.wait(AT_WORK_S):
                with self._turn:
                    if over.is_set():
                        return
                    try:
                        dist.broadcast_object_list([None], src=0, group=self._words)
                    except RuntimeError as error:
                        logger.warning("another rank does not hear rank 0 any more (%s)", error)
                        return

        thread = threading.Thread(target=reassure, name="manyhands ranks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()  # it sends nothing more from here on, unless it has begun to
            thread.join(PATIENCE_S)

    @torch.no_grad()
    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors of rank 0 to all ranks, over the job's own process group; all of them call it."""
        with self._lost("to share the parameters"):
            for tensor in tensors:
                dense = tensor.detach().contiguous()
                dist.broadcast(dense, src=0)
                if self.rank != 0 and not tensor.is_contiguous():
                    tensor.copy_(dense)

    @contextmanager
    def _lost(self, what_for: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of gloo and NCCL alike
            raise RankLost(f"rank {self.rank} of {self.num_ranks} waited for a rank {what_for}: {error}") from error


class Call(enum.IntEnum):
    """A method that all ranks call together."""

    INIT = 0
    STEP = 1
    SETTLE = 2
    WAIT_FOR_OTHERS = 3
    STATE_DIGEST = 4
    LOAD_STATE_DICT = 5


class RankState(NamedTuple):
    """The figures of all ranks; see :class:`manyhands.optim.process_group.ProcessGroupOptimizer`."""

    global_step: int = 0
    num_peers: int = 1
    samples_accumulated: int = 0
    is_stepping: bool = False
    samples_per_second: float = 0.0
    last_contribution: int = 0
    statistics: Statistics = Statistics()


@dataclass(frozen=True, kw_only=True)
class Word:
    """Rank 0's message to the others at the end of a call.

    Attributes:
        result: of the call.
        error: why there is none; the other fields are then undefined.
        has_moved: the parameters have changed; they follow by :meth:`Ranks.share`.
        options: of the parameter groups after a change, such as the learning rate.
    """

    standing: RankState = field(default_factory=RankState)
    result: Any = None
    error: Exception | None = None
    has_moved: bool = False
    options: list[dict[str, Any]] = field(default_factory=list)


class Batch(NamedTuple):
    """One rank's arguments to ``step``."""

    samples: float | None
    weight: float | None


def added_up(batches: Sequence[Batch]) -> tuple[int | None, float | None]:
    """The batch of all ranks together; a broken rule on one of them breaks it for all.

    Raises:
        ConfigError: only some ranks gave a weight, or a batch size.
    """
    sums: list[float | None] = []
    for name, numbers in zip(("a batch size", "weight"), zip(*batches, strict=True), strict=True):
        given = [number for number in numbers if number is not None]
        if given and len(given) != len(batches):
            raise ConfigError(f"{name} was given on {len(given)} of {len(batches)} ranks; give it on all, or on none")
        wrong = (number for number in given if not number >= 0)
        sums.append(next(wrong, sum(given)) if given else None)
    samples, weight = sums
    return (None, None) if samples is None else (int(samples), weight)


def unequal(batches: Sequence[Batch]) -> str:
    """A hint if the ranks' batches differ: the mean of their gradients is then not the mean over all samples."""
    sizes = [batch.samples if batch.weight is None else batch.weight for batch in batches]
    if len(set(sizes)) == 1:
        return ""
    return (
        f"the ranks have batches of {', '.join(f'{size:g}' for size in sizes if size is not None)}, but "
        "DistributedDataParallel counts each rank alike: give all of them equal batches, or multiply the loss of each "
        "by the number of ranks and by its part of the whole batch"
    )


def batches_of(call: Call, rows: Sequence[Sequence[float | None]]) -> list[Batch]:
    """The batches of all ranks for one call, from rows of the call's number and the batch.

    Raises:
        ConfigError: the ranks made different calls.
    """
    calls = [Call(int(row[0] or 0)) for row in rows]
    if set(calls) != {call}:
        names = ", ".join(f"rank {rank} {other.name.lower()}" for rank, other in enumerate(calls))
        raise ConfigError(f"all ranks must make the same calls; here: {names}")
    return [Batch(*row[1:]) for row in rows]
