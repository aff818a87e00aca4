"""Accounts as honest peers and liars publish them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId
from manyhands.optim.metrics import AccountRecord, RecentSteps, alone_lineage

Shares = Mapping[str, float]
ROSTER = bytes(32)
"""Digest of the roster after a step that a peer has made alone."""


def start() -> Position:
    return Position(0, b"")


def after(position: Position, shares: Shares, salt: str = "") -> Position:
    """Where a committed round leads."""
    if len(shares) == 1 and not salt:
        (peer,) = shares
        return Position(position.step + 1, alone_lineage(position.lineage, PeerId(peer), ROSTER))
    name = f"{sorted(shares.items())} {salt}".encode()
    return Position(position.step + 1, hashlib.sha256(position.lineage + name).digest())


class Peers:
    """Some peers of one run, all of which publish honestly what they are told that they did."""

    def __init__(self, names: Sequence[str]) -> None:
        self.steps = {PeerId(name): RecentSteps(PeerId(name)) for name in names}
        self.positions = {PeerId(name): start() for name in names}
        self.used = dict.fromkeys(self.steps, 0)

    def commit(
        self, shares: Shares, *, salt: str = "", without: Sequence[str] = (), left: Position | None = None
    ) -> Position:
        """A round of the peers with a share, from the position of the first; ``without`` does not get to publish it."""
        left = left or self.positions[PeerId(next(iter(shares)))]
        reached = after(left, shares, salt)
        by_id = {PeerId(name): weight for name, weight in shares.items()}
        for peer_id, samples in by_id.items():
            self.positions[peer_id] = reached
            self.used[peer_id] += int(samples)
            if peer_id not in without:
                self.steps[peer_id].add(left, reached, by_id, roster=ROSTER if len(by_id) == 1 else b"")
        return reached

    @property
    def accounts(self) -> dict[PeerId, AccountRecord]:
        return {
            peer_id: AccountRecord(step=self.positions[peer_id].step, steps=steps.listed())
            for peer_id, steps in self.steps.items()
        }
