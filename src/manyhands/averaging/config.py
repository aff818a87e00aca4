"""Settings of averaging rounds."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from manyhands.averaging.grid.seats import MAX_SIDE
from manyhands.base.arguments import check_number, number_of, whole
from manyhands.base.errors import ConfigError

MAX_BANDWIDTH_MBIT_S = 8_000_000
AUTO = "auto"
SLOW_BYTES_PER_S = 25_000_000
"""Below this rate ``auto`` takes int8: sending a quarter of the bytes saves far more time than encoding takes."""
SPARSE = re.compile(r"sparse(-\d+){3}-[\d.e-]+")
"""The codec of ``LocalSteps(sparse=...)``, as :attr:`manyhands.averaging.codecs.Sparse.setting` writes it."""
CODEC_NAMES = ("none", "fp16", "bf16", "int8", "int4")
"""The names in :mod:`manyhands.averaging.codecs`, which needs torch."""
CLIP, MEAN, CENTERED_CLIP = "clip", "mean", "centered_clip"
AGGREGATES = (CLIP, MEAN, CENTERED_CLIP)


@dataclass(frozen=True, kw_only=True)
class AveragingConfig:
    """Timeouts, sizes and encoding of averaging rounds.

    Attributes:
        matchmaking_time_s: how long a round waits for expected peers; it starts at once when all are there.
        averaging_timeout_s: limit of a round, from when its group has formed until the votes are there; the verdict
            follows at once. The search for the group has as much time before that.
        codec: how values are encoded: ``none`` (exact), ``fp16``, ``bf16``, ``int8``, ``int4``, or ``auto``: ``int8``
            when a member is far away or its uplink slow, else ``none``. Norms, biases and other small tensors are
            always exact. All peers of a run must have the same setting.
        aggregate: how the members' values become one: ``mean``, or ``clip``, the mean in which values more than twice
            as large as usual, by their L2 norm, count scaled down to that. So one member moves a step no further than
            two ordinary ones of its weight. Where nobody is over that, and with fewer than three members, the two are
            the same. ``centered_clip`` is for runs of strangers: a mean that is not exact, and that several liars
            together move much less (:mod:`manyhands.averaging.allreduce.centered_clip`). All peers of a run must have
            the same setting. A :class:`manyhands.Averager` takes the mean.
        bandwidth_mbit_s: this machine's uplink in megabits per second: a first guess, until rounds have shown it (on
            Linux, on links of 10 ms and more). A peer with more bandwidth reduces more. By default it counts as the
            median of the others.
        max_group_size: a swarm of more peers than this averages in a grid of groups. All peers of a run must have the
            same setting.
    """

    matchmaking_time_s: float = 15.0
    averaging_timeout_s: float = 60.0
    codec: str = AUTO
    aggregate: str = CLIP
    bandwidth_mbit_s: float | None = None
    max_group_size: int = 256

    def __post_init__(self) -> None:
        for name in ("matchmaking_time_s", "averaging_timeout_s"):
            check_number(name, getattr(self, name), example=getattr(AveragingConfig, name))
        max_group_size = whole("max_group_size", self.max_group_size, least=2, example=AveragingConfig.max_group_size)
        object.__setattr__(self, "max_group_size", max_group_size)
        if not self.matchmaking_time_s < self.averaging_timeout_s:
            raise ConfigError(
                f"matchmaking_time_s={self.matchmaking_time_s} and averaging_timeout_s={self.averaging_timeout_s}: "
                "the search for a group must outlast one wait for the others; for example 15 and 60"
            )
        if self.max_group_size > MAX_SIDE:
            raise ConfigError(f"max_group_size={self.max_group_size} must be at most {MAX_SIDE}; for example 256")
        if self.codec not in (AUTO, *CODEC_NAMES) and not self.is_sparse:
            names = ", ".join((AUTO, *CODEC_NAMES))
            raise ConfigError(f"codec {self.codec!r} is unknown; one of {names}, for example {AUTO!r}")
        check_aggregate(self.aggregate)
        if self.aggregate == CENTERED_CLIP and self.is_sparse:
            raise ConfigError(
                f"aggregate={CENTERED_CLIP!r} needs all values of all members, and sparse local steps send a part of "
                f"them; leave out sparse, or take aggregate={CLIP!r}"
            )
        if self.bandwidth_mbit_s is not None and not 0 < number_of(self.bandwidth_mbit_s) <= MAX_BANDWIDTH_MBIT_S:
            raise ConfigError(
                f"bandwidth_mbit_s={self.bandwidth_mbit_s!r} must be above 0 and at most {MAX_BANDWIDTH_MBIT_S}; "
                "for example 100.0, or None to have it measured"
            )

    @property
    def is_sparse(self) -> bool:
        """Whether only the largest values are sent, as ``LocalSteps(sparse=...)`` sets it."""
        return isinstance(self.codec, str) and SPARSE.fullmatch(self.codec) is not None


def check_aggregate(name: str) -> None:
    """Raise ``ConfigError`` if there is no such way to combine the members' values."""
    if name not in AGGREGATES:
        raise ConfigError(f"aggregate {name!r} is unknown; one of {', '.join(AGGREGATES)}, for example {CLIP!r}")


def averaging_of(
    config: AveragingConfig | None, matchmaking_time_s: float | None = None, averaging_timeout_s: float | None = None
) -> AveragingConfig:
    """The settings of the rounds; the two times may be given in ``config`` or separately.

    Raises:
        ConfigError: the times do not fit together, or were given twice.
    """
    times: dict[str, Any] = {"matchmaking_time_s": matchmaking_time_s, "averaging_timeout_s": averaging_timeout_s}
    given = {name: value for name, value in times.items() if value is not None}
    if config is not None and given:
        raise ConfigError(f"{' and '.join(given)} belong in averaging=AveragingConfig(...) when that is given too")
    return dataclasses.replace(config or AveragingConfig(), **given)
