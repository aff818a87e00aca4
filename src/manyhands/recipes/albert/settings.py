"""How one peer takes part in an ALBERT run. Imports no torch: the command line is generated from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manyhands.base.errors import ConfigError

Precision = Literal["auto", "float32", "bfloat16", "float16"]


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

    def __post_init__(self) -> None:
        if self.max_steps is not None and self.max_steps < 1:
            raise ConfigError(f"max_steps is {self.max_steps}; it must be at least 1, for example 1000")
        if self.no_checkpoints and self.checkpoint_dir is not None:
            raise ConfigError("no_checkpoints and checkpoint_dir contradict each other; give one of them")
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
