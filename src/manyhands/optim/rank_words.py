"""What the ranks of one peer say to each other, as values, and what rank 0 makes of it. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from manyhands.base.errors import ConfigError
from manyhands.optim.statistics import Statistics


class Call(enum.IntEnum):
    """What all ranks call together."""

    INIT = 0
    STEP = 1
    SETTLE = 2
    WAIT_FOR_OTHERS = 3
    STATE_DIGEST = 4
    LOAD_STATE_DICT = 5


class RankState(NamedTuple):
    """Where the peer stands; see the properties of :class:`ProcessGroupOptimizer`."""

    global_step: int = 0
    num_peers: int = 1
    samples_accumulated: int = 0
    is_stepping: bool = False
    samples_per_second: float = 0.0
    last_contribution: int = 0
    statistics: Statistics = Statistics()


@dataclass(frozen=True, kw_only=True)
class Word:
    """What rank 0 says at the end of a call.

    Attributes:
        result: of the call.
        error: why there is none; then nothing else is said.
        has_moved: the parameters are others than before; they follow.
        options: of the parameter groups then, such as the learning rate.
    """

    standing: RankState = field(default_factory=RankState)
    result: Any = None
    error: Exception | None = None
    has_moved: bool = False
    options: list[dict[str, Any]] = field(default_factory=list)


class Batch(NamedTuple):
    """What one rank gives to one call of ``step``."""

    samples: float | None
    weight: float | None


def added_up(batches: Sequence[Batch]) -> tuple[int | None, float | None]:
    """The batch of all ranks together; what breaks a rule on one of them breaks it for all.

    Raises:
        ConfigError: some ranks gave a weight, or a batch size, and others did not.
    """
    weights = [batch.weight for batch in batches if batch.weight is not None]
    if weights and len(weights) != len(batches):
        raise ConfigError(f"weight was given on {len(weights)} of {len(batches)} ranks; give it on all, or on none")
    samples = [batch.samples for batch in batches if batch.samples is not None]
    if len(samples) != len(batches):
        if samples:
            raise ConfigError(f"a batch size was given on {len(samples)} of {len(batches)} ranks; give it on all")
        return None, None
    return int(_sum_or_wrong(samples)), _sum_or_wrong(weights) if weights else None


def unequal(batches: Sequence[Batch]) -> str:
    """A hint, if the mean of the ranks' gradients, each a mean over its own batch, is not the mean over all batches."""
    sizes = [batch.samples if batch.weight is None else batch.weight for batch in batches]
    if len(set(sizes)) == 1:
        return ""
    return (
        f"the ranks have batches of {', '.join(f'{size:g}' for size in sizes if size is not None)}, but "
        "DistributedDataParallel counts each rank alike: give all of them equal batches, or multiply the loss of each "
        "by the number of ranks and by its part of the whole batch"
    )


def _sum_or_wrong(numbers: list[float]) -> float:
    return next((number for number in numbers if not number >= 0), sum(numbers))


def batches_of(call: Call, rows: Sequence[Sequence[float | None]]) -> list[Batch]:
    """The batches in what the ranks said when they came to a call: the number of that, then their batch.

    Raises:
        ConfigError: they came to different calls.
    """
    calls = [Call(int(row[0] or 0)) for row in rows]
    if set(calls) != {call}:
        names = ", ".join(f"rank {rank} {other.name.lower()}" for rank, other in enumerate(calls))
        raise ConfigError(f"all ranks must make the same calls; here: {names}")
    return [Batch(*row[1:]) for row in rows]
