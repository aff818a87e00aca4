"""Which branch of the run a peer should be on, by what the others say. Pure; times are those of the loop.

The branch with the highest (global step, samples in its lineage, digest) leads. But one signed record must not decide
which model everybody holds. A branch that is ahead of this peer is believed when

* more than half of the peers that it has met in committed rounds, and that are still there, are ahead on it; or else
* at least half of all peers that have learnt anything are, this one included. Peers whose addresses are of one network
  (a /24 or /48) count once; peers without an address do not count, unless nobody has one.

So a split heals by the higher branch, as long as that has half of the peers. If it has fewer, those who are on it see
that most peers are on another branch, and follow them after a while.

Of the branches that it believes in, a peer can only follow one whose state it can have: from a peer that can be
dialled, or that is connected.
"""

from __future__ import annotations

import ipaddress
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from manyhands.averaging.messages import NUM_RECENT_STEPS, Position, readable_addresses
from manyhands.base.identity import PeerId
from manyhands.optim.run.progress import ProgressRecord, rank_of

logger = logging.getLogger(__name__)

LAG_STEPS = 2
"""Records are read late, so peers on one branch are seen up to so many steps apart."""
OUTVOTED_S = 20.0
"""So long most peers must be elsewhere before this one follows them to a branch that is not ahead."""
MAX_MET = 4096
MAX_BEEN_AT = 256
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


class _Electorate(NamedTuple):
    """Who counts: peers, each with the name of its vote, of which there may be several of one name."""

    voters: Mapping[PeerId, str]
    num_votes: int
    is_half_enough: bool

    def is_enough(self, peers: Iterable[PeerId]) -> bool:
        num = len({self.voters[peer_id] for peer_id in peers if peer_id in self.voters})
        return num > 0 and (2 * num > self.num_votes or (self.is_half_enough and 2 * num == self.num_votes))

    def most_voted(self, positions: Mapping[PeerId, Position]) -> Position:
        """Of several with as many votes the lowest: one peer alone cannot put itself above the others."""
        told = {(position, self.voters[peer_id]) for peer_id, position in positions.items() if peer_id in self.voters}
        votes = Counter(position for position, _ in told)
        return min(votes, key=lambda position: (-votes[position], position.step, position.lineage))


class Belief:
    """What one peer goes by when others say that they are elsewhere."""

    def __init__(self) -> None:
        self._met: dict[PeerId, None] = {}
        self._been_at: deque[Position] = deque(maxlen=MAX_BEEN_AT)
        self._has_stepped = False
        self._outvoted_since = math.inf

    def been_at(self, position: Position) -> None:
        """This peer is, or was, there."""
        if position not in self._been_at:
            self._been_at.append(position)

    def met(self, members: Iterable[PeerId]) -> None:
        """A step was made by this peer, with others if there are any."""
        self._has_stepped = True
        for peer_id in members:
            self._met.pop(peer_id, None)
            self._met[peer_id] = None
        while len(self._met) > MAX_MET:
            del self._met[next(iter(self._met))]

    def has_met(self, peer_id: PeerId) -> bool:
        """Whether a peer was in a committed round with this one."""
        return peer_id in self._met

    def recently_met(self, num: int) -> list[PeerId]:
        """The last ones."""
        return list(self._met)[-num:]

    def doubted(self, own: ProgressRecord, records: Mapping[PeerId, ProgressRecord]) -> frozenset[PeerId]:
        """Those who say that they are ahead, on a branch that this peer does not believe in."""
        ahead = {peer_id: record.position for peer_id, record in records.items() if is_ahead(record, own)}
        if not any(position.step for position in ahead.values()):
            return frozenset()  # nothing has been learnt yet
        believed = self._believed(own, records, ahead)
        return frozenset(peer_id for peer_id, position in ahead.items() if position != believed)

    def _believed(
        self, own: ProgressRecord, records: Mapping[PeerId, ProgressRecord], ahead: Mapping[PeerId, Position]
    ) -> Position | None:
        for electorate in self._electorates(own, records):
            for highest in sorted({position.step for position in ahead.values()}, reverse=True):
                up_there = [peer_id for peer_id, position in ahead.items() if position.step >= highest - LAG_STEPS]
                if electorate.is_enough(up_there):
                    near = {peer_id: ahead[peer_id] for peer_id in up_there if ahead[peer_id].step <= highest}
                    return electorate.most_voted(near) if not electorate.voters.keys().isdisjoint(near) else None
        return None

    def other_majority(
        self, own: ProgressRecord, records: Mapping[PeerId, ProgressRecord], now: float
    ) -> Position | None:
        """Where most peers have been for a while, if that is not ahead and this peer has never been there."""
        elsewhere = {
            peer_id: record.position for peer_id, record in records.items()
            if record.position != own.position and record.position.step
            and record.position not in self._been_at and not is_ahead(record, own)
        }  # fmt: skip
        if own.position.step and elsewhere:
            for electorate in self._electorates(own, records):
                if electorate._replace(is_half_enough=False).is_enough(elsewhere):
                    self._outvoted_since = min(self._outvoted_since, now)
                    return electorate.most_voted(elsewhere) if now >= self._outvoted_since + OUTVOTED_S else None
        self._outvoted_since = math.inf
        return None

    def _electorates(self, own: ProgressRecord, records: Mapping[PeerId, ProgressRecord]) -> Iterator[_Electorate]:
        met = {peer_id: str(peer_id) for peer_id in records if peer_id in self._met}
        yield _Electorate(met, len(met), is_half_enough=False)
        learnt = {peer_id: record for peer_id, record in records.items() if record.position.step}
        voters = {peer_id: network_of(peer_id, record) for peer_id, record in learnt.items() if record.addresses}
        voters = voters or {peer_id: str(peer_id) for peer_id in learnt}
        is_own_counted = self._has_stepped and own.position.step > 0
        yield _Electorate(voters, len(set(voters.values())) + is_own_counted, is_half_enough=True)


def believed_by_a_newcomer(records: Mapping[PeerId, ProgressRecord]) -> dict[PeerId, ProgressRecord]:
    """The records of the branch that most peers are on, for one that has met nobody: an evaluator, say."""
    nowhere = ProgressRecord(Position(0, b""), 0, 0.0, 0, is_client=True, addresses=[], ttl_s=0.0)
    doubted = Belief().doubted(nowhere, records)
    return {peer_id: record for peer_id, record in records.items() if peer_id not in doubted}


def is_ahead(record: ProgressRecord, own: ProgressRecord) -> bool:
    """Whether a record is of a higher branch."""
    return record.position != own.position and rank_of(record) > rank_of(own)


def network_of(peer_id: PeerId, record: ProgressRecord) -> str:
    """The network in which a peer says that it is, as peers of one owner are; else the peer itself."""
    for address in readable_addresses(record.addresses):
        if address.protocol.startswith("ip") and address.is_public:
            prefix = 24 if ipaddress.ip_address(address.host).version == 4 else 48
            return str(ipaddress.ip_network(f"{address.host}/{prefix}", strict=False))
    return peer_id


class BranchChoice:
    """Chooses the branch of one peer, by what the others said when :meth:`look` was called last.

    Args:
        own: the record of this peer.
        is_connected: whether another peer, in client mode, has a connection to this one.

    Attributes:
        belief: what this peer goes by when others say that they are elsewhere.
        believed: what the others say, without those that are ahead on a branch that this peer does not believe in.
    """

    def __init__(self, own_id: PeerId, own: ProgressRecord, is_connected: Callable[[PeerId], bool]) -> None:
        self.belief = Belief()
        self.believed: Records = {}
        self._own_id = own_id
        self._own = own
        self._is_connected = is_connected
        self._records: Records = {}
        self._strangers: Mapping[PeerId, bytes] = {}
        self._doubted: frozenset[PeerId] = frozenset()
        self._doubted_since: dict[PeerId, float] = {}  # infinitely late once it was said
        self._shunned: dict[PeerId, float] = {}  # until when
        self._majority: Position | None = None  # where most peers are that do not follow this peer's branch
        self._waits_since = math.inf  # for peers in client mode that have the state to connect
        self._has_waited = False

    def look(self, own: ProgressRecord, records: Records, strangers: Mapping[PeerId, bytes], now: float) -> None:
        """The records of the others may have changed, or this peer has gone elsewhere: judge anew."""
        old = self._records
        unread = {
            peer_id for peer_id in self._doubted_since.keys() & old.keys() if records.get(peer_id) is old[peer_id]
        }
        self._own, self._records, self._strangers = own, records, strangers
        self.belief.been_at(own.position)
        self._majority = self.belief.other_majority(own, records, now)
        self._doubted = self.belief.doubted(own, records)
        since = self._doubted_since  # one whose record this peer has caught up with may say more in its next one
        self._doubted_since = {peer_id: since.get(peer_id, now) for peer_id in self._doubted | unread}
        self.name_doubted(now)
        self._shunned = {peer_id: until for peer_id, until in self._shunned.items() if until > now}
        shunned = {peer_id for peer_id in self._shunned.keys() & records.keys() if is_ahead(records[peer_id], own)}
        out = self._doubted | shunned
        self.believed = {peer_id: record for peer_id, record in records.items() if peer_id not in out}
        self._waits_since = min(self._waits_since, now) if self._is_only_with_clients() else math.inf
        self._has_waited = now - self._waits_since >= CLIENT_PATIENCE_S

    def name_doubted(self, now: float) -> None:
        """Log each peer that has not been believed for a while, once."""
        for peer_id in self._doubted:
            if now >= self._doubted_since[peer_id] + DOUBT_S:
                self._doubted_since[peer_id] = math.inf
                logger.warning("Peer %s says that the run is at step %d, and too few others do: it is not followed",
                               peer_id, self._records[peer_id].position.step)  # fmt: skip

    def shun(self, peer_id: PeerId, now: float) -> None:
        """A peer has handed out a state that cannot be used: what it says of a better branch does not count."""
        self._shunned[peer_id] = now + SHUN_S

    def can_hand_out(self, peer_id: PeerId) -> bool:
        """Whether this peer could have the state of another one: of a client only if that is connected to it."""
        record = self._records.get(peer_id)
        if record is None or not record.is_client:
            return record is not None
        return not self._own.is_client and self._is_connected(peer_id)

    def leading(self, without_state: Container[PeerId]) -> Branch:
        """The branch that this peer should be on: of those whose state can be had.

        Args:
            without_state: peers that could not hand out their state, and have said nothing since.
        """
        if (branch := self._overruling()) is not None:
            return branch
        reachable = self._within_reach()
        others = {peer_id: record for peer_id, record in reachable.items() if peer_id not in without_state}
        return leading_branch(others, self._own_id, self._own, self._strangers)

    def best(self) -> Branch:
        """The best branch that is known, whether or not its state can be had now.

        Peers in client mode can never have it from each other: they follow those who can be dialled.
        """
        if (branch := self._overruling()) is not None:
            return branch
        others = self._within_reach() if self._own.is_client or self._has_waited else self.believed
        return leading_branch(others, self._own_id, self._own, self._strangers)

    def waits_for_clients(self) -> bool:
        """Whether this peer needs the state that only peers in client mode have: one of them has to connect to it."""
        branch = self.best()
        is_needed = branch.is_elsewhere(self._own.position)
        return is_needed and all(self._records[peer_id].is_client for peer_id in branch.holders)

    def _overruling(self) -> Branch | None:
        """Where most peers are, if they do not follow the branch that this peer is on."""
        if self._majority is None:
            return None
        holders = [
            peer_id for peer_id, record in sorted(self._records.items())
            if record.position == self._majority and peer_id not in self._shunned and self.can_hand_out(peer_id)
        ]  # fmt: skip
        return Branch(self._majority, self._records[holders[0]].lineage_samples, tuple(holders)) if holders else None

    def _within_reach(self) -> Records:
        """The believed records, without those of peers that are elsewhere and whose state cannot be had."""
        return {
            peer_id: record
            for peer_id, record in self.believed.items()
            if record.position == self._own.position or self.can_hand_out(peer_id)
        }

    def _is_only_with_clients(self) -> bool:
        """Whether only peers in client mode that are not connected have the state of the best branch."""
        reachable = self._within_reach()
        if self._own.is_client or len(reachable) == len(self.believed):
            return False
        best = leading_branch(self.believed, self._own_id, self._own, self._strangers)
        return best.is_elsewhere(self._own.position) and reachable.keys().isdisjoint(best.holders)
