"""Events of trainers and evaluators for other programs, one JSON object a line."""

from __future__ import annotations

import msgspec


class Counts(msgspec.Struct, frozen=True):
    """Totals of a trainer; see :class:`manyhands.optim.optimizer.Statistics`."""

    samples_computed: int
    samples_used: int
    samples_dropped: int
    rounds_committed: int
    rounds_aborted: int
    bytes_sent: int


class Joined(msgspec.Struct, tag="joined"):
    """The trainer has joined the run at ``step``; ``heldout_loss`` is that of the state it starts from."""

    peer_id: str
    step: int
    heldout_loss: float


class BatchDone(msgspec.Struct, tag="batch"):
    """The trainer has computed a local batch at its own speed of ``samples_per_second``."""

    step: int
    loss: float
    samples_per_second: float
    counts: Counts


class StepDone(msgspec.Struct, tag="step"):
    """The trainer has reached a global step; ``loss`` is the mean over its own batches of the step, if it had any.

    Attributes:
        round_id: hexadecimal id of the round; empty for a step made alone or loaded.
        num_peers: members of the round.
        left_out: of these, the peers without which the others made the step, as they were lost or at fault.
        is_member: whether this peer is a member of the run, or else a guest (:mod:`manyhands.averaging.roster`).
    """

    step: int
    loss: float | None
    round_id: str
    num_peers: int
    counts: Counts
    left_out: list[str] = []
    is_member: bool = False


class Finished(msgspec.Struct, tag="finished"):
    """The trainer has stopped at ``step``; ``state_digest`` is equal on all peers that hold the same state."""

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


TrainerEvent = Joined | BatchDone | StepDone | Finished
