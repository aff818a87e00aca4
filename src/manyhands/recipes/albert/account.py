"""What a trainer can say of itself, for people. Imports no torch: the command line shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How one trainer and its run stand now.

    Attributes:
        step: global steps that are made.
        samples: towards the next step, by all peers together.
        eta_s: seconds until the target; infinite while nobody computes.
        is_averaging: the target is reached, and this peer makes the step.
        share: of this peer's samples in all of the steps that it took part in, with the one being made.
        loss: mean over this peer's batches of the step; of the last one that it had batches in.
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
    """Means over the same held-out samples, before the first step of this trainer and now."""

    before: float
    after: float
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one trainer has done from its start to its end.

    Attributes:
        seconds: that it has trained.
        step: global steps that the run has made.
        num_steps: of these, with this peer.
        samples_used: of this peer, in these steps.
        samples_of_all: of all peers, in these steps.
        first_loss, last_loss: means over this peer's batches of the first and of the last step that it had any in.
        heldout: None if there was no time to compute it.
        folder: with the checkpoints; None if none are kept.
        checkpoint: the newest one in it, if there is one.
    """

    run_id: str
    seconds: float
    step: int
    num_steps: int
    samples_used: int
    samples_of_all: int
    first_loss: float | None
    last_loss: float | None
    heldout: HeldoutLosses | None
    folder: Path | None
    checkpoint: Path | None
