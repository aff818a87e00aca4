"""Detects partitions of a grid from the rounds of each peer's last ``NUM_RECENT_STEPS`` steps. Pure.

Nobody knows all groups of a step in a grid, so when the network is cut, both parts go through the same positions while
their parameters part. Each peer publishes the rounds of its last steps. Peers that were in one round are connected, and
so are those connected with one of them; a round that failed or an empty cell does not separate anybody, as others
connect them. The parts of a cut have no round in common once it is ``NUM_RECENT_STEPS`` steps old. A peer that has
published fewer steps is never taken for a stranger. All peers that read the same records see the same parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from manyhands.averaging.messages import NUM_RECENT_STEPS, ROUND_NAME_BYTES
from manyhands.base.identity import PeerId


class PartitionDetector:
    """The rounds of one peer's last steps in a grid, and which other peers are not connected with it by theirs."""

    def __init__(self) -> None:
        self._steps: deque[bytes] = deque(maxlen=NUM_RECENT_STEPS)

    @property
    def recent_rounds(self) -> list[bytes]:
        """What this peer publishes: for each step the names of its rounds, one after the other."""
        return list(self._steps)

    def met(self, fingerprints: Iterable[bytes]) -> None:
        """This peer has made a step in a grid; these are the manifests of its rounds that committed."""
        self._steps.append(b"".join(fingerprint[:ROUND_NAME_BYTES] for fingerprint in fingerprints))

    def follow(self, recent_rounds: Sequence[bytes]) -> None:
        """This peer has loaded the state of another one, which has published these rounds; none if not known."""
        self._steps.clear()
        self._steps.extend(step[: len(step) // ROUND_NAME_BYTES * ROUND_NAME_BYTES] for step in recent_rounds)

    def strangers(self, published: Mapping[PeerId, Sequence[bytes]]) -> dict[PeerId, bytes]:
        """The peers of other parts, with a name that is equal for all of one part.

        Args:
            published: recent rounds of the others whose step is less than ``NUM_RECENT_STEPS`` away from this peer's;
                older ones have no round in common with it in any case.
        """
        if len(self._steps) < NUM_RECENT_STEPS or not any(published.values()):
            return {}
        parents: dict[bytes, bytes] = {}  # of rounds that are connected: a forest with one root for each part

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

        own = connected(self._steps)
        firsts = {peer_id: connected(steps) for peer_id, steps in published.items()}
        roots = {
            peer_id: root(first)
            for peer_id, first in firsts.items()
            if first and len(published[peer_id]) >= NUM_RECENT_STEPS
        }
        return {peer_id: part for peer_id, part in roots.items() if part != root(own)}
