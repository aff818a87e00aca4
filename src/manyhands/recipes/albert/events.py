"""What trainers and evaluators tell to programs, one JSON object a line."""

from __future__ import annotations

import msgspec


class Counts(msgspec.Struct, frozen=True):
    """What a trainer has done so far; see :class:`manyhands.optim.optimizer.Statistics`."""

    samples_computed: int
    samples_used: int
    samples_dropped: int
    rounds_committed: int
    rounds_aborted: int
    bytes_sent: int


class Joined(msgspec.Struct, tag="joined"):
    """The trainer has joined the run at ``step``; ``heldout_loss`` is that of the state it begins with."""

    peer_id: str
    step: int
    heldout_loss: float


class BatchDone(msgspec.Struct, tag="batch"):
    """One local batch was computed; ``samples_per_second`` is the trainer's own speed."""

    step: int
    loss: float
    samples_per_second: float
    counts: Counts


class StepDone(msgspec.Struct, tag="step"):
    """A global step was reached; ``loss`` is the mean over this trainer's batches of the step, if it had any.

    Attributes:
        round_id: hexadecimal id of the round; empty for a step made alone or loaded.
        num_peers: members of the round.
    """

    step: int
    loss: float | None
    round_id: str
    num_peers: int
    counts: Counts


class Finished(msgspec.Struct, tag="finished"):
    """The trainer stopped at ``step``; ``state_digest`` is equal on all peers that hold the same state."""

    step: int
    heldout_loss: float
    state_digest: str
    counts: Counts


class Evaluated(msgspec.Struct, tag="evaluated"):
    """An evaluator has measured the state of ``step`` on ``num_samples`` held-out samples; accuracies from 0 to 1."""

    step: int
    heldout_loss: float
    mlm_accuracy: float
    sop_accuracy: float
    num_samples: int


Event = Joined | BatchDone | StepDone | Finished
