"""Which branch of the run this peer believes in. Pure; times are those of the loop.

One signed record must not decide which model everybody holds. A branch that is ahead of this peer is believed when

* more than half of the peers that it has met in committed rounds, and that are still there, are ahead on it; or else
* at least half of all peers that have learnt anything are, this one included. Peers whose addresses are of one network
  (a /24 or /48) count once; peers without an address do not count, unless nobody has one.

So a split heals by the higher branch, as long as that has half of the peers. If it has fewer, those who are on it see
that most peers are on another branch, and follow them after a while.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from manyhands.averaging.messages import Position, readable_addresses
from manyhands.base.identity import PeerId
from manyhands.optim.run.progress import ProgressRecord, rank_of

LAG_STEPS = 2
"""Records are read late, so peers on one branch are seen up to so many steps apart."""
OUTVOTED_S = 20.0
"""So long most peers must be elsewhere before this one follows them to a branch that is not ahead."""
MAX_MET = 4096
MAX_BEEN_AT = 256


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
            if record.position.step and record.position not in self._been_at and not is_ahead(record, own)
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
