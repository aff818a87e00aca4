"""Settings of one peer in an ALBERT run. Imports no torch: the command line is generated from here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.timing import METRICS_S
from manyhands.base.errors import ConfigError
from manyhands.checkpoints.checkpoint_dir import SAVED_EVERY
from manyhands.dht.config import DhtConfig
from manyhands.optim.config import ProgressConfig
from manyhands.optim.metrics import checked_name

Precision = Literal["auto", "float32", "bfloat16", "float16"]
Delay = Literal["optimizer", "gradients"]

MAX_TTL_S = DhtConfig.max_ttl_s
_DEVICE = re.compile(r"auto|(cpu|cuda|hpu|mps|npu|xla|xpu)(:\d+)?")


def check_device(name: str) -> None:
    """Check the form of a device's name. Whether the device exists is checked later, by torch.

    Raises:
        ConfigError: no device has such a name.
    """
    if not _DEVICE.fullmatch(name):
        raise ConfigError(f"device {name!r} is unknown; write auto, cpu, cuda, cuda:1 or mps")


def own_rank() -> int:
    """Rank of this process in its trainer under ``torchrun``; 0 without it."""
    return _of_torchrun("RANK", 0)


def num_ranks() -> int:
    """Number of processes of this trainer; 1 without ``torchrun``."""
    return _of_torchrun("WORLD_SIZE", 1)


def _of_torchrun(name: str, otherwise: int) -> int:
    """Read a variable of ``torchrun``. Cluster schedulers set variables of these names too, but no ``MASTER_PORT``."""
    if not all(os.environ.get(needed, "").isdecimal() for needed in ("RANK", "WORLD_SIZE", "MASTER_PORT")):
        return otherwise
    return int(os.environ[name])


@dataclass(frozen=True, kw_only=True)
class TuningSettings:
    """Times and speeds of one peer; the defaults suit most machines and links.

    Raises:
        ConfigError: a value is out of bounds.
    """

    matchmaking_time_s: float = AveragingConfig.matchmaking_time_s
    """Seconds that a round waits for expected peers. It starts as soon as all have come."""

    averaging_timeout_s: float = AveragingConfig.averaging_timeout_s
    """Seconds after which a round is aborted. Its gradients count in the next one."""

    bandwidth_mbit_s: float | None = None
    """First estimate of the uplink in megabits per second; rounds then measure it."""

    min_refresh_s: float = ProgressConfig.min_refresh_s
    """Shortest time between two progress refreshes, in seconds."""

    max_refresh_s: float = ProgressConfig.max_refresh_s
    """Longest time between two progress refreshes, in seconds."""

    progress_ttl_s: float = ProgressConfig.ttl_s
    """Lifetime of a progress record in seconds: a dead peer is counted for at most this long."""

    metrics_ttl_s: float = METRICS_S
    """Lifetime of the metrics of a step in seconds, for monitors."""

    def __post_init__(self) -> None:
        if not self.min_refresh_s <= self.max_refresh_s < self.progress_ttl_s:
            raise ConfigError(
                f"max_refresh_s is {self.max_refresh_s}; it must be at least min_refresh_s ({self.min_refresh_s}) and "
                f"below progress_ttl_s ({self.progress_ttl_s}), for example with --progress-ttl-s "
                f"{4 * max(self.max_refresh_s, self.min_refresh_s):g}"
            )
        for name in ("min_refresh_s", "metrics_ttl_s"):
            if not 0 < getattr(self, name) <= MAX_TTL_S:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be above 0 and at most {MAX_TTL_S:g} seconds, "
                    "for example 1"
                )
        self.averaging()

    def averaging(self) -> AveragingConfig:
        """The settings for rounds."""
        return AveragingConfig(
            matchmaking_time_s=self.matchmaking_time_s,
            averaging_timeout_s=self.averaging_timeout_s,
            bandwidth_mbit_s=self.bandwidth_mbit_s,
        )

    def progress(self) -> ProgressConfig:
        """The settings for progress records."""
        return ProgressConfig(
            min_refresh_s=self.min_refresh_s,
            max_refresh_s=self.max_refresh_s,
            ttl_s=self.progress_ttl_s,
        )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of a trainer besides the recipe.

    Raises:
        ConfigError: a value is out of bounds.
    """

    name: str | None = None
    """Name of this peer on the pages of monitors: 1 to 32 characters, for everybody to see."""

    max_steps: int | None = None
    """Stop when the run has made this many global steps; without it, train until Ctrl-C."""

    stop_file: Path | None = None
    """Stop at the global step whose number another program writes into this file."""

    checkpoint_dir: Path | None = None
    """Folder for model, optimizer and identity of this peer, for restarts. By default ./manyhands-RUN_ID."""

    no_checkpoints: bool = False
    """Save no checkpoints, and no identity except that of --state-dir or --identity."""

    checkpoint_every: int = SAVED_EVERY
    """Global steps from one checkpoint to the next; one more is saved at the end."""

    keep_checkpoints: int = 2
    """Number of checkpoints to keep; older ones are deleted."""

    gradient_accumulation_steps: int = 1
    """Batches between two checks of the progress of the run. A higher value saves time if one batch is very short."""

    log_every: int | None = None
    """Log the loss of this machine every N batches. It is always logged at each global step."""

    log_first_batch: bool = False
    """Log the loss of the first batch as well."""

    tensorboard: Path | None = None
    """Write the curves of this machine into this folder, for TensorBoard."""

    linger_s: float = 30.0
    """At the end, stay at most this many seconds for peers that must still load the state. After Ctrl-C or SIGTERM, for
    peers that are downloading it."""

    allow_solo: bool = False
    """Continue alone when other peers are visible but no round with them succeeds. The run may split."""

    auxiliary: bool = False
    """Lend bandwidth without data or computing: helps peers with slow links, and peers that cannot be dialled."""

    any_text: bool = False
    """Train on the text of this machine, even if the run trains on other text."""

    device: str = "auto"
    """Device in torch's notation: cpu, cuda, cuda:1, mps. auto is an NVIDIA GPU if there is one, else the CPU."""

    precision: Precision = "auto"
    """Precision of matrix products. auto is the half precision in which the GPU is fast, and float32 elsewhere."""

    delay: Delay | None = None
    """gradients: average and make the update in the background, while the next batches are computed on parameters that
    are one step old; optimizer: only the update. Each peer may have its own setting."""

    threads: int | None = None
    """CPU threads that torch may use; by default torch decides."""

    slow_down: float = 1.0
    """Slow each batch down by this factor, by sleeping, to try how unequal machines train together."""

    tuning: TuningSettings = field(default_factory=TuningSettings)
    """Times and speeds of this peer."""

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.name is not None:
            checked_name(self.name)
        if num_ranks() > 1 and self.stop_file is not None:
            raise ConfigError("stop_file is given under torchrun, where only one process would read it; give max_steps")
        if num_ranks() > 1 and self.auxiliary:
            raise ConfigError("auxiliary is given under torchrun, and it computes nothing; start it without torchrun")
        if self.max_steps is not None and self.max_steps < 1:
            raise ConfigError(f"max_steps is {self.max_steps}; it must be at least 1, for example 1000")
        if self.no_checkpoints and self.checkpoint_dir is not None:
            raise ConfigError("no_checkpoints and checkpoint_dir contradict each other; give one of them")
        for name in ("keep_checkpoints", "gradient_accumulation_steps", "log_every"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ConfigError(f"{name} is {number}; it must be at least 1, for example 2")
        if self.checkpoint_every < 1:
            raise ConfigError(f"checkpoint_every is {self.checkpoint_every}; it must be at least 1, for example 100")
        if not 1.0 <= self.slow_down <= 1000.0:
            raise ConfigError(f"slow_down is {self.slow_down}; it must be from 1 to 1000, for example 2")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads is {self.threads}; it must be at least 1, for example 4")
        if not 0 <= self.linger_s <= 3600:
            raise ConfigError(f"linger_s is {self.linger_s}; it must be from 0 to 3600 seconds, for example 30")

    def stop_step(self) -> int | None:
        """The global step at which to stop; None while there is none."""
        steps = [self.max_steps] if self.max_steps is not None else []
        if self.stop_file is not None and self.stop_file.exists():
            text = self.stop_file.read_text(errors="replace").strip()
            if text.isdecimal():
                steps.append(int(text))
            elif text:  # an empty file is being written
                raise ConfigError(
                    f"stop_file {self.stop_file} has {text[:20]!r}; it must have a global step, such as 8"
                )
        return min(steps, default=None)
