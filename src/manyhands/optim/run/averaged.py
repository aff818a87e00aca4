"""What the averaging of one global step came to, in one group or in several."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from manyhands.averaging.grid.step import GridOutcome
from manyhands.averaging.messages import Position, RoundManifest
from manyhands.averaging.round_outcome import CommittedRound
from manyhands.base.identity import PeerId
from manyhands.optim.run.progress import sum_of_samples


@dataclass(frozen=True)
class Averaged:
    """A committed averaging.

    Attributes:
        mean_N: the averaged gradient, which may be changed; None if this peer has lost it, and must load the state.
        parameters_N: averaged parameters to make the step from, in a grid every so many steps; else None.
        manifest: of the round, in a grid of the last one that committed here.
        lineage: where the step leads.
        samples: of the step, for the lineage: equal on all peers that make it.
        num_peers: that averaged together.
        averaging_s: seconds, without the search for the group.
        members: who makes the same step.
        contributors: whose samples count in it; None in a grid, of which nobody knows all groups.
        is_left_out: what this peer brought is not in it.
        is_outsized: that is because it was too large beside what the others brought.
        num_rounds, num_committed: of the step, and of these how many committed here.
        disagreement: how far apart the parameters of the peers were before the step, if that is known: the root mean
            square distance from their mean, as a fraction of its size; of whom says
            :meth:`manyhands.optim.run.drift.Drift.disagreement`.
    """

    mean_N: torch.Tensor | None
    manifest: RoundManifest
    lineage: bytes
    samples: int
    num_peers: int
    averaging_s: float
    members: list[PeerId] = field(default_factory=list)
    contributors: list[PeerId] | None = None
    parameters_N: torch.Tensor | None = None
    is_left_out: bool = False
    is_outsized: bool = False
    num_rounds: int = 1
    num_committed: int = 1
    disagreement: float | None = None


def averaged_in_one_group(
    result: CommittedRound, position: Position, own_id: PeerId, weight: float, disagreement: float | None
) -> Averaged:
    """The outcome of a round of all peers, from a position."""
    manifest = result.manifest
    return Averaged(
        result.averaged_N,
        manifest,
        position.after(manifest).lineage,
        sum_of_samples(manifest.weights),
        result.num_members,
        result.seconds - result.matchmaking_s,
        list(manifest.members),
        [member for member, of_member in zip(manifest.members, manifest.weights, strict=True) if of_member > 0],
        is_left_out=weight > 0 and not manifest.weights[manifest.members.index(own_id)] > 0,
        is_outsized=result.is_outsized,
        disagreement=disagreement,
    )


def averaged_in_grid(
    outcome: GridOutcome,
    position: Position,
    numel: int,
    samples: int,
    members: list[PeerId],
    averaging_s: float,
    disagreement: float | None,
) -> Averaged:
    """The outcome of the rounds of a step in a grid, from a position.

    No peer knows all groups, so all that step from one position have one lineage, whatever their groups committed.

    Args:
        numel: of the gradient; what lies behind it are parameters.
    """
    committed = outcome.committed
    assert committed is not None
    assert committed.averaged_N is not None
    both = committed.averaged_N
    return Averaged(
        both[:numel],
        committed.manifest,
        hashlib.sha256(position.lineage + b"grid").digest(),
        samples,
        len(members),
        averaging_s,
        members,
        parameters_N=both[numel:] if both.numel() > numel else None,
        is_left_out=outcome.is_left_out,
        num_rounds=outcome.num_rounds,
        num_committed=outcome.num_committed,
        disagreement=disagreement,
    )
