"""Reports of a round: its phases, its costs, and how it ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from manyhands.averaging.messages import RoundManifest
from manyhands.base.identity import PeerId


class Phase(enum.Enum):
    """The phase of a member's round."""

    JOINING = "joining"
    FORMED = "formed"
    VOTING = "voting"
    CONCLUDED = "concluded"


@dataclass
class RoundMeter:
    """Adds up the costs of a peer's attempts at a round.

    Attributes:
        num_bytes_sent, num_bytes_received: on the streams between the members, before encryption.
        matchmaking_s, averaging_s, vote_s: seconds spent in each phase.
    """

    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    matchmaking_s: float = 0.0
    averaging_s: float = 0.0
    vote_s: float = 0.0


@dataclass(frozen=True)
class CommittedRound:
    """A committed round.

    Attributes:
        averaged_N: the weighted mean, on the CPU, in the dtype of the vectors, bit-identical on all members. None if
            this member lacks what most hold: it was left out, or could not fetch a part. It must load the others' state
            to follow them.
        manifest: the contributors and their weights.
        seconds: from the call to the verdict.
        matchmaking_s: the part of it that was spent looking for the group.
        reason, blamed: what went wrong on the way, and because of which members; empty if nothing did.
        is_outsized: the others left out this peer's values, as they were too large beside theirs.
    """

    averaged_N: torch.Tensor | None
    manifest: RoundManifest
    seconds: float
    matchmaking_s: float
    reason: str = ""
    blamed: tuple[PeerId, ...] = ()
    is_outsized: bool = False

    @property
    def num_members(self) -> int:
        return len(self.manifest.members)
