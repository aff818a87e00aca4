"""How one peer takes part in an ALBERT run. Imports no torch: the command line is generated from here."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from manyhands.averaging.config import AveragingConfig
from manyhands.base.errors import ConfigError
from manyhands.dht.config import DhtConfig
from manyhands.optim.config import ProgressConfig
from manyhands.optim.metrics import TTL_S

Precision = Literal["auto", "float32", "bfloat16", "float16"]

MAX_TTL_S = DhtConfig.max_ttl_s


def own_rank() -> int:
    """Of this process, among those of one trainer that ``torchrun`` has started; 0 without it."""
    return _of_torchrun("RANK", 0)


def num_ranks() -> int:
    """Processes of this trainer; 1 without ``torchrun``."""
    return _of_torchrun("WORLD_SIZE", 1)


def _of_torchrun(name: str, otherwise: int) -> int:
    """Schedulers of clusters set such variables too; only those of ``torchrun`` come with an address to meet at."""
    if not all(os.environ.get(needed, "").isdecimal() for needed in ("RANK", "WORLD_SIZE", "MASTER_PORT")):
        return otherwise
    return int(os.environ[name])


@dataclass(frozen=True, kw_only=True)
class TuningSettings:
    """Times and speeds of one peer; the defaults suit most machines and links.

    Raises:
        ConfigError: a value breaks its rule.
    """

    matchmaking_time_s: float = AveragingConfig.matchmaking_time_s
    """How long a round waits for peers that are expected; it starts at once when all are there."""

    averaging_timeout_s: float = AveragingConfig.averaging_timeout_s
    """A round that takes longer is given up, and its gradients count in the next one."""

    bandwidth_mbit_s: float | None = None
    """What this machine can send, in megabits per second: a first guess, until rounds have shown it."""

    batch_size_lead: int | None = None
    """Look for the group of a step so many samples before the target; by default 6 s before it."""

    min_refresh_s: float = ProgressConfig.min_refresh_s
    """Tell and ask how far the run is at most this often."""

    max_refresh_s: float = ProgressConfig.max_refresh_s
    """And at least this often."""

    default_refresh_s: float = ProgressConfig.default_refresh_s
    """And this often while nobody's speed is known."""

    expected_drift_peers: float = ProgressConfig.expected_drift_peers
    """So many newcomers may appear before the next look ..."""

    expected_drift_rate: float = ProgressConfig.expected_drift_rate
    """... or this share of the peers."""

    progress_ttl_s: float = ProgressConfig.ttl_s
    """A peer that has died counts for so long."""

    metrics_ttl_s: float = TTL_S
    """Monitors see what this peer has told of its last step for so long."""

    def __post_init__(self) -> None:
        if not self.min_refresh_s <= self.max_refresh_s < self.progress_ttl_s:
            raise ConfigError(
                f"max_refresh_s is {self.max_refresh_s}; it must be at least min_refresh_s ({self.min_refresh_s}) and "
                f"below progress_ttl_s ({self.progress_ttl_s}), for example with --progress-ttl-s "
                f"{4 * max(self.max_refresh_s, self.min_refresh_s):g}"
            )
        for name in ("min_refresh_s", "default_refresh_s", "metrics_ttl_s"):
            if not 0 < getattr(self, name) <= MAX_TTL_S:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be above 0 and at most {MAX_TTL_S:g} seconds, "
                    "for example 1"
                )
        if self.batch_size_lead is not None and self.batch_size_lead < 0:
            raise ConfigError(f"batch_size_lead is {self.batch_size_lead}; it must be at least 0, for example 300")
        self.averaging()

    def averaging(self) -> AveragingConfig:
        """Of the rounds."""
        return AveragingConfig(
            matchmaking_time_s=self.matchmaking_time_s,
            averaging_timeout_s=self.averaging_timeout_s,
            bandwidth_mbit_s=self.bandwidth_mbit_s,
        )

    def progress(self) -> ProgressConfig:
        """Of the progress records."""
        return ProgressConfig(
            min_refresh_s=self.min_refresh_s,
            max_refresh_s=self.max_refresh_s,
            default_refresh_s=self.default_refresh_s,
            expected_drift_peers=self.expected_drift_peers,
            expected_drift_rate=self.expected_drift_rate,
            ttl_s=self.progress_ttl_s,
        )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What a trainer does besides the recipe.

    Raises:
        ConfigError: a value breaks its rule.
    """

    max_steps: int | None = None
    """Stop when the run has made this many global steps; without it, train until Ctrl-C."""

    stop_file: Path | None = None
    """Stop at the global step whose number another program writes into this file."""

    checkpoint_dir: Path | None = None
    """Keep model, optimizer and this peer's identity here, and go on from there; by default ./manyhands-RUN_ID."""

    no_checkpoints: bool = False
    """Keep nothing: no model, and no identity but that of --state-dir or --identity."""

    checkpoint_every: int = 100
    """Global steps from one checkpoint to the next; one more is saved at the end."""

    keep_checkpoints: int = 2
    """So many of them, the newest, stay in the folder."""

    gradient_accumulation_steps: int = 1
    """Batches between two looks at the run: more save time where one batch is very short."""

    log_every: int | None = None
    """Log the loss of this machine every so many batches; it is logged at each global step in any case."""

    log_first_batch: bool = False
    """Log the loss of the first batch as well."""

    tensorboard: Path | None = None
    """Write the curves of this machine into this folder, for TensorBoard."""

    linger_s: float = 30.0
    """At the end, stay at most this many seconds for peers that still need to load the state."""

    allow_solo: bool = False
    """Go on alone when other peers are seen, but no round with them succeeds; the run may split."""

    auxiliary: bool = False
    """Lend bandwidth without data: help those to average who cannot be dialled or have slow links; computes nothing."""

    device: str = "auto"
    """Where to compute, as torch names it: cpu, cuda, cuda:1, mps; auto is an NVIDIA GPU if there is one, else cpu."""

    precision: Precision = "auto"
    """What to compute products in; auto is the half precision that the GPU is fast in, and float32 on others."""

    threads: int | None = None
    """CPU threads that torch may use; by default as many as it likes."""

    slow_down: float = 1.0
    """Take this many times as long for each batch, by sleeping: to see how unequal machines train together."""

    tuning: TuningSettings = field(default_factory=TuningSettings)
    """Times and speeds of this peer."""

    def __post_init__(self) -> None:
        if num_ranks() > 1 and self.stop_file is not None:
            raise ConfigError("stop_file is read by one process alone; under torchrun give max_steps")
        if num_ranks() > 1 and self.auxiliary:
            raise ConfigError("auxiliary computes nothing, so one process is enough: start it without torchrun")
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
            raise ConfigError(f"threads is {self.threads}; it must be at least 1")
        if not 0 <= self.linger_s <= 3600:
            raise ConfigError(f"linger_s is {self.linger_s}; it must be from 0 to 3600 seconds, for example 30")

    def stop_step(self) -> int | None:
        """The global step at which to stop, as far as is known now."""
        steps = [self.max_steps] if self.max_steps is not None else []
        if self.stop_file is not None and self.stop_file.exists():
            text = self.stop_file.read_text(errors="replace").strip()
            if not text.isdecimal():
                raise ConfigError(f"stop_file {self.stop_file} holds {text[:20]!r}; a global step is needed, such as 8")
            steps.append(int(text))
        return min(steps, default=None)
