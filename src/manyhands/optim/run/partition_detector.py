"""Detects partitions of a grid from the rounds of each peer's last ``NUM_RECENT_STEPS`` steps. Pure.

No peer knows all groups of a step in a grid, so after a network split both parts go through the same positions while
their parameters diverge. Each peer publishes the rounds of its last steps. Peers in one round are connected, and so are
peers connected to one of them. A failed round or an empty cell separates no peers, as others connect them. The parts of
a split have no round in common once it is ``NUM_RECENT_STEPS`` steps old. A peer that has published fewer steps never
counts as a stranger. All peers that read the same records see the same parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from manyhands.averaging.messages import NUM_RECENT_STEPS, ROUND_NAME_BYTES
from manyhands.base.identity import PeerId


class PartitionDetector:
    """The rounds of one peer's last steps in a grid; finds the other peers that these do not connect with it.

    Attributes:
        recent_rounds: the published form: for each step the concatenated names of its rounds.
    """

    def __init__(self) -> None:
        self.recent_rounds: list[bytes] = []

    def record_rounds(self, fingerprints: Iterable[bytes]) -> None:
        """Record a step by the manifests of its rounds that committed.

        Args:
            fingerprints: none outside of a grid, where all peers at the new position have come the same way.
        """
        joined = b"".join(fingerprint[:ROUND_NAME_BYTES] for fingerprint in fingerprints)
        self.recent_rounds = [*self.recent_rounds, joined][-NUM_RECENT_STEPS:] if joined else []

    def follow(self, recent_rounds: Sequence[bytes]) -> None:
        """Take over the rounds of the peer whose state this one has loaded; none if unknown."""
        whole = [step[: len(step) // ROUND_NAME_BYTES * ROUND_NAME_BYTES] for step in recent_rounds]
        self.recent_rounds = whole[-NUM_RECENT_STEPS:]

    def strangers(self, published: Mapping[PeerId, Sequence[bytes]]) -> dict[PeerId, bytes]:
        """The peers of other parts, each with a name that is the same for all of its part.

        Args:
            published: recent rounds of the others whose step is less than ``NUM_RECENT_STEPS`` away from this peer's;
                older ones have no round in common with it in any case.
        """
        if len(self.recent_rounds) < NUM_RECENT_STEPS or not any(published.values()):
            return {}
        parents: dict[bytes, bytes] = {}  # of connected rounds: a forest with one root for each part

        def root(name: bytes) -> bytes:
            while (parent := parents.get(name, name)) != name:
                parents[name] = parents.get(parent, parent)
                name = parent
            return name

        def connected(steps: Iterable[bytes]) -> bytes:
            """Connect all rounds of one peer; returns the first of them, empty if there is none."""
            joined = b"".join(step[: len(step) // ROUND_NAME_BYTES * ROUND_NAME_BYTES] for step in steps)
            rounds = [joined[at : at + ROUND_NAME_BYTES] for at in range(0, len(joined), ROUND_NAME_BYTES)]
            for each in rounds[1:]:
                parents[root(each)] = root(rounds[0])
            return rounds[0] if rounds else b""

        own = connected(self.recent_rounds)
        firsts = {peer_id: connected(steps) for peer_id, steps in published.items()}
        roots = {
            peer_id: root(first)
            for peer_id, first in firsts.items()
            if first and len(published[peer_id]) >= NUM_RECENT_STEPS
        }
        return {peer_id: part for peer_id, part in roots.items() if part != root(own)}
