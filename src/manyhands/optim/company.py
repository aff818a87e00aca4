"""Which peers of a grid of groups have made the last steps together, and which are another part of the run. Pure.

In a grid all who step from one position are at one position, as nobody knows all groups of a step; so when the network
is cut, its parts have the same positions while their parameters part. What tells them apart are their rounds: each peer
publishes in which ones it was in its last ``NUM_STEPS`` steps. Who was in one round is connected, and so is whoever is
connected with one of these. A dead mate, a round that failed, or an empty cell leaves a row or a column away, and those
are connected by others; the parts of a cut have no round in common once it is ``NUM_STEPS`` steps old.

Nobody is taken for a stranger who has not made so many steps in a grid, or does not say so. Who asks knows of itself
only what it publishes: so all who have read the same records see the same parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec

from manyhands.averaging.grid import MAX_AXES
from manyhands.base.identity import PeerId

NUM_STEPS = 4
"""Fewer see a cut sooner; but records of others that are so many steps old must not look like one."""
ROUND_BYTES = 8
"""Of the digest of a round's manifest."""

RecentRounds = Annotated[
    list[Annotated[bytes, msgspec.Meta(max_length=ROUND_BYTES * MAX_AXES)]], msgspec.Meta(max_length=NUM_STEPS)
]
"""For each of the last steps in a grid, the newest last, the rounds that committed there, end to end."""


class Company:
    """With whom one peer has made its last steps."""

    def __init__(self) -> None:
        self._steps: deque[bytes] = deque(maxlen=NUM_STEPS)

    @property
    def recent_rounds(self) -> list[bytes]:
        """What the others must know of it."""
        return list(self._steps)

    def met(self, fingerprints: Iterable[bytes]) -> None:
        """A step in a grid.

        Args:
            fingerprints: of the manifests of those of its rounds that committed here.
        """
        self._steps.append(b"".join(fingerprint[:ROUND_BYTES] for fingerprint in fingerprints))

    def follow(self, recent_rounds: Sequence[bytes]) -> None:
        """This peer has the state of another one, which has published this; or nothing, if that is not known."""
        self._steps.clear()
        self._steps.extend(step[: len(step) // ROUND_BYTES * ROUND_BYTES] for step in recent_rounds)

    def strangers(self, said: Mapping[PeerId, Sequence[bytes]]) -> dict[PeerId, bytes]:
        """Those who are not connected with this peer, and to which part each belongs: equal for those of one.

        Args:
            said: what each of the others has published, who has made less than ``NUM_STEPS`` steps more or less. From
                older records nobody can tell, as no round in them is one of this peer's last ones.
        """
        if len(self._steps) < NUM_STEPS or not any(said.values()):
            return {}
        chains = _Chains()
        own = chains.joined(self._steps)
        firsts = {peer_id: chains.joined(steps) for peer_id, steps in said.items() if len(steps) >= NUM_STEPS}
        for steps in said.values():
            if 0 < len(steps) < NUM_STEPS:
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
            step[start : start + ROUND_BYTES]
            for step in steps
            for start in range(0, len(step) - ROUND_BYTES + 1, ROUND_BYTES)
        ]
        for each in rounds[1:]:
            self._parents[self.root(each)] = self.root(rounds[0])
        return rounds[0] if rounds else b""
