"""How far the collaboration is, from the records of its peers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from manyhands.averaging.messages import Count, Position
from manyhands.base.identity import PeerId
from manyhands.optim.config import ProgressConfig


class ProgressRecord(msgspec.Struct, frozen=True):
    """What one peer says of itself; published under its own signature.

    Attributes:
        position: global step and lineage.
        samples: accumulated since the last global step.
        samples_per_second: own speed.
        lineage_samples: samples in all the committed steps that led to this position.
        is_client: it cannot be dialled.
        addresses: where it can be.
        ttl_s: the record counts for so long.
    """

    position: Position
    samples: Count
    samples_per_second: float
    lineage_samples: Count
    is_client: bool
    addresses: list[str]
    ttl_s: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(number) and number >= 0 for number in (self.samples_per_second, self.ttl_s)):
            raise ValueError("speeds and times are finite and >= 0")


@dataclass(frozen=True)
class Branch:
    """A position of the run, and who can hand out its state."""

    position: Position
    lineage_samples: int
    holders: tuple[PeerId, ...]


@dataclass(frozen=True)
class Progress:
    """How far the collaboration is towards its next global step.

    Attributes:
        samples: accumulated at this position by all peers together.
        num_peers: peers at this position, with this one.
        samples_per_second: of all peers.
        eta_s: seconds until the target at that speed; infinite when nobody computes.
    """

    samples: int
    num_peers: int
    samples_per_second: float
    eta_s: float


def aggregate(
    own: ProgressRecord | None, others: Mapping[PeerId, ProgressRecord], position: Position, target_batch_size: int
) -> Progress:
    """Sum up the records at one position."""
    records = [record for record in others.values() if record.position == position]
    if own is not None:
        records.append(own)
    samples = sum(record.samples for record in records)
    speed = sum(record.samples_per_second for record in records)
    missing = max(target_batch_size - samples, 0)
    eta_s = 0.0 if missing == 0 else missing / speed if speed > 0 else math.inf
    return Progress(samples, len(records), speed, eta_s)


def describe_progress(progress: Progress, refresh_s: float) -> str:
    """The sentence that people know from the tutorials."""
    eta = f"{progress.eta_s:.2f} seconds" if math.isfinite(progress.eta_s) else "unknown"
    return (
        f"Collaboration accumulated {progress.samples} samples from {progress.num_peers} peers; "
        f"ETA {eta} (refresh in {refresh_s:.2f}s.)"
    )


def next_refresh_s(progress: Progress, config: ProgressConfig) -> float:
    """When to read the records again: earlier than the predicted target by the drift that newcomers may bring."""
    num_peers = progress.num_peers
    drift = max(num_peers + config.expected_drift_peers, num_peers * (1 + config.expected_drift_rate))
    predicted_s = progress.eta_s * num_peers / drift if math.isfinite(progress.eta_s) else config.default_refresh_s
    return min(max(predicted_s, config.min_refresh_s), config.max_refresh_s)


def leading_branch(others: Mapping[PeerId, ProgressRecord], own_id: PeerId, own: ProgressRecord) -> Branch:
    """The branch that all peers should be on.

    The highest (global step, samples in its lineage, digest) wins. At step 0 nothing has been learnt yet, and the
    initial parameters of the lowest peer id win. Only peers that can be dialled count: nobody could follow the others,
    so a peer that cannot be dialled follows those who can.
    """
    candidates = {peer_id: record for peer_id, record in others.items() if not record.is_client}
    if not own.is_client or not candidates:
        candidates[own_id] = own
    last_step = max(record.position.step for record in candidates.values())
    best = candidates[min(candidates)] if last_step == 0 else max(candidates.values(), key=rank_of)
    holders = [peer_id for peer_id, record in candidates.items() if record.position == best.position]
    return Branch(best.position, best.lineage_samples, tuple(sorted(holders)))


def rank_of(record: ProgressRecord) -> tuple[int, int, bytes]:
    """Orders the branches of a run: the higher one wins."""
    return (record.position.step, record.lineage_samples, record.position.lineage)
