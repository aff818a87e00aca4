"""Decides which of the other peers' claims about the position of the run a peer believes. Pure; times are loop times.

Each record claims a position. No single signed record may decide which model all peers hold
(docs/adr/0018-weights-and-belief.md), so an *electorate* votes on the claims: peers of one kind, of those whose records
are there. Each of them votes for the position in its record. The first row that applies says which electorate a peer
asks (docs/adr/0056-the-initial-peers-decide-for-newcomers.md):

=======================================  =============  ===================================================  =========
this peer                                electorate     consists of                                          enough is
=======================================  =============  ===================================================  =========
has made a step, and some are there      roster         the voters of its roster, former ones too; with      half
                                                        this peer, if it is one. In a grid, it is the
                                                        roster of the last step in one group
an initial peer is beyond step 0         initial peers  those of the peers that this one was given to join   more than
                                                        by that are beyond step 0; with this peer, if it is  half; with
                                                        there after a step of its own                        it, half
any other                                networks       one voter for each network in which its initial      half
                                                        peers have reached peers beyond step 0
                                                        (:mod:`.reached_networks`); this peer's own
                                                        network too, if it is there after a step of its own
=======================================  =============  ===================================================  =========

In the first ``FOUNDING_ROUNDS`` steps of a run, the networks are asked too if too few voters are on any branch that is
ahead: the run may have been begun twice, by peers that did not know each other, and then no peer is a voter on both
sides. They are asked on while most of them are on another branch.

A peer believes the highest position for which enough votes are there. Of a branch that is not ahead, a peer follows
only one with more than half of the votes, and only after a while (:meth:`Belief.other_majority`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from manyhands.averaging.messages import Position, readable_addresses
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.roster import Roster
from manyhands.averaging.timing import STALL_S
from manyhands.base.identity import PeerId
from manyhands.dht.networks import network_of
from manyhands.optim.run.progress import branch_order

FOUNDING_ROUNDS = 16
"""The number of first rounds of a run in which the roster alone does not decide."""
LAG_STEPS = 2
"""Records are read late, so peers on one branch may appear up to this many steps apart."""
MAX_BEEN_AT = 256
"""The largest number of former positions that are remembered."""

Records = Mapping[PeerId, PeerRecord]
Poll = Callable[[Records], Mapping[PeerId, str]]
"""Returns the peers that vote, each with the name of its vote: several peers may share one."""


# votes


class Votes(NamedTuple):
    """The votes of one electorate.

    Attributes:
        voters: each with the name of its vote. Several voters may share one vote, such as that of their network.
        num_votes: number of all votes, those for none of the claims included.
        is_half_enough: half of the votes is enough; else more than half is needed.
    """

    voters: Mapping[PeerId, str]
    num_votes: int
    is_half_enough: bool

    @classmethod
    def of(cls, peers: Iterable[PeerId], *, num_more: int = 0, is_half_enough: bool = False) -> Votes:
        """One vote for each of these peers, and ``num_more`` votes that are for none of the claims."""
        voters = {peer_id: str(peer_id) for peer_id in sorted(peers)}
        return cls(voters, len(voters) + num_more, is_half_enough)

    def is_enough(self, peers: Iterable[PeerId]) -> bool:
        """Whether the votes of these peers are enough."""
        num = len({self.voters[peer_id] for peer_id in peers if peer_id in self.voters})
        return num > 0 and (2 * num > self.num_votes or (self.is_half_enough and 2 * num == self.num_votes))

    def believed(self, ahead: Mapping[PeerId, Position]) -> Position | None:
        """The highest position that enough voters have reached or are at most ``LAG_STEPS`` steps behind; or None."""
        for highest in sorted({position.step for position in ahead.values()}, reverse=True):
            up_there = [peer_id for peer_id, position in ahead.items() if position.step >= highest - LAG_STEPS]
            if self.is_enough(up_there):
                near = {peer_id: ahead[peer_id] for peer_id in up_there if ahead[peer_id].step <= highest}
                return self.most_voted(near) if not self.voters.keys().isdisjoint(near) else None
        return None

    def most_voted(self, positions: Mapping[PeerId, Position]) -> Position:
        """The position with the most votes; of several the lowest, so that a lone claim of a higher one wins no tie."""
        told = {(position, self.voters[peer_id]) for peer_id, position in positions.items() if peer_id in self.voters}
        votes = Counter(position for position, _ in told)
        return min(votes, key=lambda position: (-votes[position], position.step, position.lineage))


def voters_by_claims(records: Records) -> dict[PeerId, str]:
    """The peers beyond step 0, each with the name of its vote by the network that it claims.

    These are those with an address, or all if none has one. It serves peers that only watch.
    """
    learnt = {peer_id: record for peer_id, record in records.items() if record.position.step}
    voters = {peer_id: voter_of(peer_id, record.addresses) for peer_id, record in learnt.items() if record.addresses}
    return voters or {peer_id: str(peer_id) for peer_id in learnt}


def voter_of(peer_id: PeerId, addresses: Sequence[str]) -> str:
    """The name of a peer's vote by the addresses that it claims: the network of the first public one, else its id."""
    for address in readable_addresses(addresses):
        if address.protocol.startswith("ip") and address.is_public:
            return network_of(address.host)
    return peer_id


# the verdict


class Judgement(NamedTuple):
    """The peers that claim to be ahead, but that this peer does not follow now."""

    unbelieved: frozenset[PeerId] = frozenset()  # too few voters are on their branch
    undecided: frozenset[PeerId] = frozenset()  # there is no voter yet


class Belief:
    """Decides which of the others' claims about their positions one peer believes.

    Args:
        initial_peers: returns the peers that this one was given to join by.
        poll: returns the voters of the electorate *networks* among all records, each with the name of its vote.

    Attributes:
        roster: returns the roster at this peer's position.
        has_stepped: whether this peer has made a step itself.
        been_at: the last positions of this peer, with the present one.
    """

    def __init__(
        self,
        own_id: PeerId,
        initial_peers: Callable[[], frozenset[PeerId]] = frozenset,
        poll: Poll = voters_by_claims,
    ) -> None:
        self._own_id = own_id
        self.initial_peers = initial_peers
        self.poll = poll
        self.roster: Callable[[], Roster] = Roster
        self.has_stepped = False
        self.been_at: deque[Position] = deque(maxlen=MAX_BEEN_AT)
        self._outvoted_since = math.inf

    def judge(self, own: PeerRecord, records: Records) -> Judgement:
        """Judge the claims of all peers that claim to be ahead."""
        ahead = {peer_id: record.position for peer_id, record in records.items() if is_ahead(record, own)}
        if not any(position.step for position in ahead.values()):
            return Judgement()  # all of them are at step 0, where claims need no belief
        believed = None
        for votes in self._electorates(own, records):
            if not votes.voters:
                return Judgement(undecided=frozenset(ahead))
            if (believed := votes.believed(ahead)) is not None:
                break
        return Judgement(frozenset(peer_id for peer_id, position in ahead.items() if position != believed))

    def other_majority(self, own: PeerRecord, records: Records, now: float) -> Position | None:
        """The position of the majority, if that is on another branch, not ahead of this peer, and has been for a while.

        None if this peer has been at that position, or before ``STALL_S`` seconds are over.
        """
        elsewhere = {
            peer_id: record.position for peer_id, record in records.items()
            if record.position.step and record.position not in (own.position, *self.been_at)
            and not is_ahead(record, own)
        }  # fmt: skip
        if own.position.step and elsewhere:
            for votes in self._electorates(own, records):
                if not votes.voters:
                    return None  # the time of ``STALL_S`` goes on
                if votes._replace(is_half_enough=False).is_enough(elsewhere):
                    self._outvoted_since = min(self._outvoted_since, now)
                    return votes.most_voted(elsewhere) if now >= self._outvoted_since + STALL_S else None
        self._outvoted_since = math.inf
        return None

    def judges(self, own: PeerRecord, records: Records) -> frozenset[PeerId]:
        """The peers whose majority has the right parameters: the first electorate, one peer for each vote."""
        voters = next(self._electorates(own, records)).voters
        return frozenset({vote: peer_id for peer_id, vote in voters.items()}.values())

    def _electorates(self, own: PeerRecord, records: Records) -> Iterator[Votes]:
        """The votes of each electorate that this peer asks, in order; the table at the head of this file."""
        there = records.keys() - {self._own_id}
        roster = self.roster() if self.has_stepped else Roster()
        of_roster = roster.voters.union(roster.former)
        num_own = int(self.has_stepped and own.position.step > 0)
        if of_roster & there:
            yield Votes.of(of_roster & there, num_more=self._own_id in of_roster, is_half_enough=True)
            if own.position.step > FOUNDING_ROUNDS and self._outvoted_since == math.inf:
                return
        elif initial_peers := {peer_id for peer_id in self.initial_peers() & there if records[peer_id].position.step}:
            yield Votes.of(initial_peers, num_more=num_own, is_half_enough=num_own > 0)
            return
        voters = self.poll(records)
        yield Votes(voters, len(set(voters.values())) + num_own, is_half_enough=True)


def is_ahead(record: PeerRecord, own: PeerRecord) -> bool:
    """Whether a record claims a higher branch than this peer's."""
    return record.position != own.position and branch_order(record) > branch_order(own)


# for peers that take no part in rounds


def held_by_most(records: Records) -> Position:
    """The position of the run, as peers believe it that only watch: more than half of the claimed networks decide.

    Args:
        records: of at least one peer.
    """
    voters = voters_by_claims(records)
    votes = Votes(voters, len(set(voters.values())), is_half_enough=False)
    believed = votes.believed({peer_id: record.position for peer_id, record in records.items()})
    return believed or max(records.values(), key=branch_order).position  # without a majority, or at step 0


def believed_by_a_newcomer(records: Records, trusted: frozenset[PeerId], poll: Poll) -> dict[PeerId, PeerRecord]:
    """The records that an evaluator, say, believes, which has made no step; empty while it cannot tell.

    Args:
        trusted: its initial peers.
        poll: as for :class:`Belief`.
    """
    nowhere = PeerRecord(Position(0, b""), is_client=True, addresses=[])
    unbelieved, undecided = Belief(PeerId(""), lambda: trusted, poll).judge(nowhere, records)
    if undecided:
        return {}
    return {peer_id: record for peer_id, record in records.items() if peer_id not in unbelieved}
