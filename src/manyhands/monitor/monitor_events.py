"""Events of a monitor, for other programs."""

from __future__ import annotations

import msgspec

from manyhands.monitor.picture import EventKind


class Listening(msgspec.Struct, tag="listening"):
    """The monitor can be dialled; ``addresses`` are multiaddrs."""

    peer_id: str
    addresses: list[str]


class ProgressMade(msgspec.Struct, tag="progress"):
    """The progress of a run; ``eta_s`` is None while no peer computes."""

    step: int
    samples: int
    target_batch_size: int
    num_peers: int
    samples_per_second: float
    eta_s: float | None


class StepMade(msgspec.Struct, tag="step_seen"):
    """A global step, summed over the metrics of its peers; ``loss`` is the mean over their micro-batches."""

    step: int
    loss: float
    alive_peers: int
    samples: int
    samples_per_second: float


class HeldoutSeen(msgspec.Struct, tag="heldout_seen"):
    """The measurement of an evaluator at a global step; see :class:`manyhands.optim.metrics.HeldoutRecord`."""

    step: int
    heldout_loss: float
    mlm_accuracy: float
    sop_accuracy: float


class Happened(msgspec.Struct, tag="happened"):
    """Something that happened to a peer or to the run; see :class:`manyhands.monitor.picture.RunEvent`."""

    kind: EventKind
    text: str
    step: int
    peer_id: str
    name: str


MonitorEvent = Listening | ProgressMade | StepMade | HeldoutSeen | Happened
