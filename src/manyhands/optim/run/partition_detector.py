"""Which peers of a grid of groups have made the last steps together, and which are another part of the run. Pure.

In a grid all who step from one position are at one position, as nobody knows all groups of a step; so when the network
is cut, its parts have the same positions while their parameters part. What tells them apart are their rounds: each peer
publishes in which ones it was in its last ``NUM_RECENT_STEPS`` steps, and says so when it comes to a group. Who was in
one round is connected, and so is whoever is connected with one of these. A dead mate, a round that failed, or an empty
cell leaves a row or a column away, and those are connected by others; the parts of a cut have no round in common once
it is ``NUM_RECENT_STEPS`` steps old.

Nobody is taken for a stranger who has not made so many steps in a grid, or does not say so. Who asks knows of itself
only what it publishes: so all who have read the same records see the same parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from manyhands.averaging.messages import NUM_RECENT_STEPS, ROUND_NAME_BYTES
from manyhands.base.identity import PeerId


class PartitionDetector:
    """With whom one peer has made its last steps."""

    def __init__(self) -> None:
        self._steps: deque[bytes] = deque(maxlen=NUM_RECENT_STEPS)

    @property
    def recent_rounds(self) -> list[bytes]:
        """What the others must know of it."""
        return list(self._steps)

    def met(self, fingerprints: Iterable[bytes]) -> None:
        """A step in a grid.

        Args:
            fingerprints: of the manifests of those of its rounds that committed here.
        """
        self._steps.append(b"".join(fingerprint[:ROUND_NAME_BYTES] for fingerprint in fingerprints))

    def follow(self, recent_rounds: Sequence[bytes]) -> None:
        """This peer has the state of another one, which has published this; or nothing, if that is not known."""
        self._steps.clear()
        self._steps.extend(step[: len(step) // ROUND_NAME_BYTES * ROUND_NAME_BYTES] for step in recent_rounds)

    def strangers(self, said: Mapping[PeerId, Sequence[bytes]]) -> dict[PeerId, bytes]:
        """Those who are not connected with this peer, and to which part each belongs: equal for those of one.

        Args:
            said: what each of the others has published, who has made less than ``NUM_RECENT_STEPS`` steps more or less.
                From older records nobody can tell, as no round in them is one of this peer's last ones.
        """
        if len(self._steps) < NUM_RECENT_STEPS or not any(said.values()):
            return {}
        chains = _Chains()
        own = chains.joined(self._steps)
        firsts = {peer_id: chains.joined(steps) for peer_id, steps in said.items() if len(steps) >= NUM_RECENT_STEPS}
        for steps in said.values():
            if 0 < len(steps) < NUM_RECENT_STEPS:
                chains.joined(steps)
        ours = chains.root(own)
        roots = {peer_id: chains.root(first) for peer_id, first in firsts.items() if first}
        return {peer_id: root for peer_id, root in roots.items() if root != ours}


class _Chains:
    """Rounds that are connected by those who were in several of them."""

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes] = {}

    def root(self, name: bytes) -> bytes:
        """Equal for all that are connected."""
        parents = self._parents
        while (parent := parents.get(name, name)) != name:
            parents[name] = parents.get(parent, parent)
            name = parent
        return name

    def joined(self, steps: Iterable[bytes]) -> bytes:
        """Connect all rounds of one peer; returns one of them, empty if there is none."""
        rounds = [
            step[start : start + ROUND_NAME_BYTES]
            for step in steps
            for start in range(0, len(step) - ROUND_NAME_BYTES + 1, ROUND_NAME_BYTES)
        ]
        for each in rounds[1:]:
            self._parents[self.root(each)] = self.root(rounds[0])
        return rounds[0] if rounds else b""
