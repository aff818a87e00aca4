"""The reports of a trainer about itself for its user. Imports no torch, as the command line shows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The current status of a trainer and its run.

    Attributes:
        step: global steps made so far.
        samples: accumulated for the next step, by all peers together.
        eta_s: seconds until the target is reached; infinite while no peer computes.
        is_averaging: whether the target is reached, and this peer makes the step.
        share: this peer's share of all samples in its steps, the current one included.
        loss: mean over this peer's batches of the current step, or of the last step in which it had any.
        samples_per_second: of this peer.
    """

    step: int
    samples: int
    target_batch_size: int
    eta_s: float
    num_peers: int
    is_averaging: bool
    share: float
    loss: float | None
    samples_per_second: float


@dataclass(frozen=True, kw_only=True)
class HeldoutLosses:
    """Mean losses on the same held-out samples, before this trainer's first step and now."""

    before: float
    after: float
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """The work of one trainer from its start to its end.

    Attributes:
        seconds: time spent training.
        step: global steps that the run has made.
        num_steps: number of these steps that this peer took part in.
        samples_used: samples of this peer in these steps.
        samples_counted: what these counted for: less than their number in steps in which the peer was over the limits.
        samples_of_all: what the samples of all peers counted for in these steps.
        samples_lost: samples of this peer in a step that it did not finish.
        is_alone: whether this peer sees no other peer of the run.
        first_loss, last_loss: means over this peer's batches of the first and the last step in which it had any.
        heldout: None if there was no time to compute it.
        folder: with the checkpoints; None if none are kept.
        checkpoint: the newest one in the folder, if any.
        saved_step: its global step; 0 without one.
    """

    run_id: str
    seconds: float
    step: int
    num_steps: int
    samples_used: int
    samples_counted: int
    samples_of_all: int
    samples_lost: int
    is_alone: bool
    first_loss: float | None
    last_loss: float | None
    heldout: HeldoutLosses | None
    folder: Path | None
    checkpoint: Path | None
    saved_step: int
