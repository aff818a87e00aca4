"""Which branch of the run a peer should be on, by what the others say. Pure; times are those of the loop.

The branch with the highest (global step, samples in its lineage, digest) leads, of those that this peer believes in
(:mod:`manyhands.optim.run.belief`) and whose state can be had.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from manyhands.averaging.messages import NUM_RECENT_STEPS, Position
from manyhands.base.identity import PeerId
from manyhands.optim.run.belief import Belief, is_ahead
from manyhands.optim.run.progress import ProgressRecord, rank_of

logger = logging.getLogger(__name__)

CLIENT_PATIENCE_S = 60.0
"""Peers in client mode that are ahead, and do not connect to this one for so long, are not waited for any more."""
DOUBT_S = 5.0
"""A peer that is not believed for so long is named. Some are not for a moment, until others are read as well."""
SHUN_S = 600.0
"""For so long a peer that handed out a state that cannot be used is not followed."""

Records = Mapping[PeerId, ProgressRecord]


@dataclass(frozen=True)
class Branch:
    """A position of the run, and who can hand out its state.

    Attributes:
        is_foreign: this peer and the holders have made their last steps apart, whatever their positions are.
    """

    position: Position
    lineage_samples: int
    holders: tuple[PeerId, ...]
    is_foreign: bool = False

    def is_elsewhere(self, position: Position) -> bool:
        """Whether a peer at a position has to load a state to be on this branch."""
        return self.is_foreign or self.position != position


def leading_branch(
    others: Records, own_id: PeerId, own: ProgressRecord, strangers: Mapping[PeerId, bytes] = {}
) -> Branch:
    """The branch that all peers should be on.

    The highest (global step, samples in its lineage, digest) wins. Of the parts of a grid, which may all have the same,
    the one with more peers, then the one with the lowest peer id. At step 0 nothing has been learnt yet, and the
    initial parameters of the lowest peer id win: of the trainers that can be dialled, so that all can follow; without
    any, of the auxiliary peers; without these, of all.

    Args:
        strangers: in a grid, those of another part, and which (:mod:`manyhands.optim.run.partition_detector`).
    """
    candidates = {**others, own_id: own}
    last_step = max(record.position.step for record in candidates.values())
    if last_step == 0:
        hosts = {peer_id: record for peer_id, record in candidates.items() if not record.is_client}
        trainers = {peer_id: record for peer_id, record in hosts.items() if not record.is_auxiliary}
        candidates = trainers or hosts or candidates
    first = max(map(rank_of, candidates.values()))
    sizes = Counter(  # all who read the same records count the same peers
        strangers.get(peer_id, b"")
        for peer_id, record in candidates.items()
        if len(record.recent_rounds) == NUM_RECENT_STEPS and rank_of(record) == first
    )

    def rank(peer_id: PeerId) -> tuple[tuple[int, int, bytes], int]:
        return rank_of(candidates[peer_id]), sizes[strangers.get(peer_id, b"")]

    ordered = sorted(candidates)
    best_id = ordered[0] if last_step == 0 else max(ordered, key=rank)  # of equal ones the first
    best, part = candidates[best_id], strangers.get(best_id, b"")
    holders = [
        peer_id for peer_id in ordered
        if candidates[peer_id].position == best.position and strangers.get(peer_id, b"") == part
    ]  # fmt: skip
    return Branch(best.position, best.lineage_samples, tuple(holders), is_foreign=part != b"")


class BranchChoice:
    """Chooses the branch of one peer; what it answers follows from what it was last told by :meth:`look`.

    Args:
        is_connected: whether another peer, in client mode, has a connection to this one.
    """

    def __init__(self, own_id: PeerId, belief: Belief, is_connected: Callable[[PeerId], bool]) -> None:
        self._own_id = own_id
        self._belief = belief
        self._is_connected = is_connected
        self._doubted: dict[PeerId, float] = {}  # since when; infinitely late once it was said
        self._shunned: dict[PeerId, float] = {}  # until when
        self._majority: Position | None = None  # where most peers are that do not follow this peer's branch
        self._waits_since: float | None = None  # for a peer in client mode that has the state

    def look(self, own: ProgressRecord, records: Records, strangers: Mapping[PeerId, bytes], now: float) -> None:
        """The records of the others have changed, or this peer has gone elsewhere: judge anew."""
        self._shunned = {peer_id: until for peer_id, until in self._shunned.items() if until > now}
        self._doubted = {peer_id: self._doubted.get(peer_id, now) for peer_id in self._belief.doubted(own, records)}
        for peer_id, since in self._doubted.items():
            if now >= since + DOUBT_S:
                self._doubted[peer_id] = math.inf
                logger.warning("Peer %s says that the run is at step %d, and too few others do: it is not followed",
                               peer_id, records[peer_id].position.step)  # fmt: skip
        self._majority = self._belief.other_majority(own, records, now)
        if own.is_client or not self._is_only_with_clients(own, records, strangers):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now

    def shun(self, peer_id: PeerId, now: float) -> None:
        """A peer has handed out a state that cannot be used: what it says of a better branch does not count."""
        self._shunned[peer_id] = now + SHUN_S

    def can_hand_out(self, peer_id: PeerId, own: ProgressRecord, records: Records) -> bool:
        """Whether this peer could have the state of another one: of a client only if that is connected to it."""
        record = records.get(peer_id)
        if record is None or not record.is_client:
            return record is not None
        return not own.is_client and self._is_connected(peer_id)

    def believed(self, own: ProgressRecord, records: Records) -> Records:
        """What the others say, without those who are ahead on a branch that this peer does not believe in."""
        out = self._doubted.keys() | {
            peer_id for peer_id in self._shunned.keys() & records.keys() if is_ahead(records[peer_id], own)
        }
        return {peer_id: record for peer_id, record in records.items() if peer_id not in out} if out else records

    def leading(
        self,
        own: ProgressRecord,
        records: Records,
        strangers: Mapping[PeerId, bytes],
        without_state: Container[PeerId],
    ) -> Branch:
        """The branch that this peer should be on: of those whose state can be had.

        Args:
            without_state: peers that could not hand out their state, and have said nothing since.
        """
        if (branch := self._overruling(own, records)) is not None:
            return branch
        reachable = self._within_reach(own, self.believed(own, records))
        others = {peer_id: record for peer_id, record in reachable.items() if peer_id not in without_state}
        return leading_branch(others, self._own_id, own, strangers)

    def best(self, own: ProgressRecord, records: Records, strangers: Mapping[PeerId, bytes], now: float) -> Branch:
        """The best branch that is known, whether or not its state can be had now.

        Peers in client mode can never have it from each other: they follow those who can be dialled.
        """
        if (branch := self._overruling(own, records)) is not None:
            return branch
        believed = self.believed(own, records)
        has_waited = self._waits_since is not None and now - self._waits_since >= CLIENT_PATIENCE_S
        if own.is_client or has_waited:
            believed = self._within_reach(own, believed)
        return leading_branch(believed, self._own_id, own, strangers)

    def _overruling(self, own: ProgressRecord, records: Records) -> Branch | None:
        """Where most peers are, if they do not follow the branch that this peer is on."""
        if self._majority is None:
            return None
        holders = [
            peer_id for peer_id, record in sorted(records.items())
            if record.position == self._majority and peer_id not in self._shunned
            and self.can_hand_out(peer_id, own, records)
        ]  # fmt: skip
        return Branch(self._majority, records[holders[0]].lineage_samples, tuple(holders)) if holders else None

    def _within_reach(self, own: ProgressRecord, records: Records) -> Records:
        """Without those that are elsewhere and whose state cannot be had."""
        return {
            peer_id: record
            for peer_id, record in records.items()
            if record.position == own.position or self.can_hand_out(peer_id, own, records)
        }

    def _is_only_with_clients(self, own: ProgressRecord, records: Records, strangers: Mapping[PeerId, bytes]) -> bool:
        """Whether only peers in client mode that are not connected have the state of the best branch."""
        believed = self.believed(own, records)
        best = leading_branch(believed, self._own_id, own, strangers)
        return best.is_elsewhere(own.position) and self._within_reach(own, believed).keys().isdisjoint(best.holders)
