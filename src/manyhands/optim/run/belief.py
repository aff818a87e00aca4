"""Decides which of the other peers' claims about the position of the run a peer believes. Pure; times are loop times.

Each record claims a position. No single signed record may decide which model all peers hold
(docs/adr/0018-weights-and-belief.md), so an *electorate* votes on the claims: peers of one kind, of those whose records
are there. Each of them votes for the position in its record. The first table says which electorate a peer asks
(:func:`electorates`, docs/adr/0036-newcomers-follow-their-initial-peers.md). "Then" means that a second electorate is
asked if too few of the first one are on any branch that is ahead of this peer's.

==========================================================  ===========================================================
this peer                                                   electorate
==========================================================  ===========================================================
has made no step, and an initial peer is beyond step 0      the initial peers beyond step 0
has made no step, and none of them is beyond step 0         the networks
has made a step, and members of its roster are there        the members
the same, in the first ``FOUNDING_ROUNDS`` steps of a run,  the members, then the networks
or while most others are on another branch
has made a step, and has no roster, as in a grid            the peers met in rounds, if any; then the networks
has made a step, and no member of its roster is there       the networks
==========================================================  ===========================================================

=============  ===================================================================  ===================================
electorate     consists of                                                          votes that are enough
=============  ===================================================================  ===================================
initial peers  the peers whose addresses this peer was given to join by             more than half
members        the members of this peer's roster, former ones too; with this peer,  half
               if it is one
peers met      the peers that were in committed rounds with this one                more than half
networks       one voter for each network in which this peer has reached peers      half
               beyond step 0, or its initial peers have if it cannot
               (:mod:`.canvass`); this peer's own network too, if it is beyond
               step 0 after a step of its own
=============  ===================================================================  ===================================

A peer believes the highest position for which enough votes are there. Of a branch that is not ahead, a peer follows
only one with more than half of the votes, and only after a while (:meth:`Belief.other_majority`).
"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from manyhands.averaging.messages import Position, readable_addresses
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.roster import Roster
from manyhands.averaging.timing import STALL_S
from manyhands.base.identity import PeerId
from manyhands.dht.networks import network_of
from manyhands.optim.run.progress import branch_order

LAG_STEPS = 2
"""Records are read late, so peers on one branch may appear up to this many steps apart."""
MAX_MET = 4096
"""The largest number of peers that are remembered as met in rounds."""
MAX_BEEN_AT = 256
"""The largest number of former positions that are remembered."""
FOUNDING_ROUNDS = 16
"""The number of first rounds of a run in which the members alone do not decide. The run may have been begun twice, by
peers that did not know each other; then no peer is a member of both rosters."""

Records = Mapping[PeerId, PeerRecord]


# the electorates


class Electorate(enum.Enum):
    """A kind of peers that vote; the second table at the head of this file defines each."""

    INITIAL_PEERS = "initial peers"
    MEMBERS = "members"
    MET = "peers met"
    NETWORKS = "networks"


@dataclass(frozen=True)
class Known:
    """What this peer knows of the electorates.

    Attributes:
        step: its global step.
        has_stepped: whether it has made a step itself.
        is_outvoted: whether most others were on another branch when the records last changed.
        is_member: whether it is a member of its own roster.
        members: the other members of its roster that are there, former ones too.
        met: the peers met in rounds that are there; empty if there is a roster.
        initial_peers: its initial peers that are there and beyond step 0.
    """

    step: int = 0
    has_stepped: bool = False
    is_outvoted: bool = False
    is_member: bool = False
    members: frozenset[PeerId] = frozenset()
    met: frozenset[PeerId] = frozenset()
    initial_peers: frozenset[PeerId] = frozenset()


def electorates(known: Known) -> list[Electorate]:
    """The electorates that this peer asks, in order; the first table at the head of this file."""
    if not known.has_stepped:
        return [Electorate.INITIAL_PEERS] if known.initial_peers else [Electorate.NETWORKS]
    if known.members:
        may_be_two = known.step <= FOUNDING_ROUNDS or known.is_outvoted
        return [Electorate.MEMBERS, Electorate.NETWORKS] if may_be_two else [Electorate.MEMBERS]
    return [Electorate.MET, Electorate.NETWORKS] if known.met else [Electorate.NETWORKS]


class Votes(NamedTuple):
    """The votes of one electorate.

    Attributes:
        voters: each with the name of its vote. Several voters may share one vote, such as that of their network.
        num_votes: number of all votes, including ``num_open``.
        is_half_enough: half of the votes is enough; else more than half is needed.
        num_open: number of peers that are still to be dialled. Each may turn out to have a vote, for any position.
    """

    voters: Mapping[PeerId, str]
    num_votes: int
    is_half_enough: bool
    num_open: int = 0

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

    def agreed(self, ahead: Mapping[PeerId, Position]) -> Position | None:
        """The position with more than half of all votes, however the peers vote that are not dialled yet; or None."""
        if self.voters.keys().isdisjoint(ahead):
            return None
        position = self.most_voted(ahead)
        there = [peer_id for peer_id in ahead if ahead[peer_id] == position]
        return position if self._replace(is_half_enough=False).is_enough(there) else None

    def most_voted(self, positions: Mapping[PeerId, Position]) -> Position:
        """The position with the most votes; of several the lowest, so that a lone claim of a higher one wins no tie."""
        told = {(position, self.voters[peer_id]) for peer_id, position in positions.items() if peer_id in self.voters}
        votes = Counter(position for position, _ in told)
        return min(votes, key=lambda position: (-votes[position], position.step, position.lineage))


class Poll(NamedTuple):
    """The peers whose votes count, each with the name of its vote."""

    voters: Mapping[PeerId, str]
    num_open: int  # peers that are still to be dialled; 1 while there are neither these nor voters


def poll_of_claims(records: Records) -> Poll:
    """The voters by the networks of the addresses that they claim, for a peer that only watches and dials nobody."""
    return Poll(_voters_among(records), num_open=0)


# the verdict


class Judgement(NamedTuple):
    """The peers that claim to be ahead, but that this peer does not follow now."""

    unbelieved: frozenset[PeerId] = frozenset()  # too few voters are on their branch
    undecided: frozenset[PeerId] = frozenset()  # this peer must reach more peers before it can tell


class Belief:
    """Decides which of the others' claims about their positions one peer believes.

    Args:
        initial_peers: returns the peers that this one was given to join by.
        poll: returns the voters of the electorate *networks*, from all records.

    Attributes:
        roster: returns the roster at this peer's position; None in a grid, where peers share none.
        been_at: the last positions of this peer, with the present one.
    """

    def __init__(
        self,
        own_id: PeerId,
        initial_peers: Callable[[], frozenset[PeerId]] = frozenset,
        poll: Callable[[Records], Poll] = poll_of_claims,
    ) -> None:
        self._own_id = own_id
        self.initial_peers = initial_peers
        self.poll = poll
        self.roster: Callable[[], Roster | None] = lambda: None
        self._met: dict[PeerId, None] = {}  # an ordered set: the peers met last are at the end
        self.been_at: deque[Position] = deque(maxlen=MAX_BEEN_AT)
        self._has_stepped = False
        self._outvoted_since = math.inf

    def record_step(self, members: Iterable[PeerId]) -> None:
        """Record that this peer has made a step with these other peers; with none after a step alone."""
        self._has_stepped = True
        for peer_id in members:
            self._met.pop(peer_id, None)
            self._met[peer_id] = None
        while len(self._met) > MAX_MET:
            del self._met[next(iter(self._met))]

    def has_met(self, peer_id: PeerId) -> bool:
        """Whether a peer was in a committed round with this one."""
        return peer_id in self._met

    def met(self) -> Collection[PeerId]:
        """The peers that were in a committed round with this one."""
        return self._met.keys()

    def recently_met(self, num: int) -> list[PeerId]:
        """The ``num`` peers met last."""
        return list(self._met)[-num:]

    def judge(self, own: PeerRecord, records: Records) -> Judgement:
        """Judge the claims of all peers that claim to be ahead."""
        ahead = {peer_id: record.position for peer_id, record in records.items() if is_ahead(record, own)}
        if not any(position.step for position in ahead.values()):
            return Judgement()  # all of them are at step 0, where claims need no belief
        believed = None
        for votes in self._votes(own, records):
            if votes.num_open:
                believed = votes.agreed(ahead)
                if believed is None:
                    return Judgement(undecided=frozenset(ahead))
            elif (believed := votes.believed(ahead)) is not None:
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
            for votes in self._votes(own, records):
                if votes.num_open:
                    return None  # the time of ``STALL_S`` goes on while peers are dialled
                if votes._replace(is_half_enough=False).is_enough(elsewhere):
                    self._outvoted_since = min(self._outvoted_since, now)
                    return votes.most_voted(elsewhere) if now >= self._outvoted_since + STALL_S else None
        self._outvoted_since = math.inf
        return None

    def judges(self, own: PeerRecord, records: Records) -> Poll:
        """The peers whose majority has the right parameters: the first electorate with voters, one peer per vote."""
        for votes in self._votes(own, records):
            if votes.voters:
                each = {vote: peer_id for peer_id, vote in votes.voters.items()}
                return Poll({peer_id: vote for vote, peer_id in each.items()}, votes.num_open)
        return Poll({}, num_open=0)

    def _votes(self, own: PeerRecord, records: Records) -> Iterator[Votes]:
        """The votes of each electorate, in order; lazily, as the poll of the networks dials peers."""
        known = self._known(own, records)
        return (self._votes_of(electorate, known, records) for electorate in electorates(known))

    def _known(self, own: PeerRecord, records: Records) -> Known:
        roster, there = self.roster() if self._has_stepped else None, records.keys()
        members = roster.members.union(roster.former) if roster is not None and roster.members else frozenset[PeerId]()
        initial_peers = {peer_id for peer_id in self.initial_peers() & there if records[peer_id].position.step}
        return Known(
            own.position.step,
            self._has_stepped,
            is_outvoted=self._outvoted_since < math.inf,
            is_member=self._own_id in members,
            members=frozenset(members & there - {self._own_id}),
            met=frozenset() if members else frozenset(self._met.keys() & there),
            initial_peers=frozenset(initial_peers),
        )

    def _votes_of(self, electorate: Electorate, known: Known, records: Records) -> Votes:
        match electorate:
            case Electorate.INITIAL_PEERS:
                return Votes.of(known.initial_peers)
            case Electorate.MEMBERS:
                return Votes.of(known.members, num_more=known.is_member, is_half_enough=True)
            case Electorate.MET:
                return Votes.of(known.met)
            case Electorate.NETWORKS:
                voters, num_open = self.poll(records)
                num_own = int(known.has_stepped and known.step > 0)
                num_votes = len(set(voters.values())) + num_own + num_open
                return Votes(voters, num_votes, is_half_enough=True, num_open=num_open)


def is_ahead(record: PeerRecord, own: PeerRecord) -> bool:
    """Whether a record claims a higher branch than this peer's."""
    return record.position != own.position and branch_order(record) > branch_order(own)


# for peers that take no part in rounds


def held_by_most(records: Records) -> Position:
    """The position of the run, as peers believe it that only watch: more than half of the claimed networks decide.

    Args:
        records: of at least one peer.
    """
    voters = _voters_among(records)
    votes = Votes(voters, len(set(voters.values())), is_half_enough=False)
    believed = votes.believed({peer_id: record.position for peer_id, record in records.items()})
    return believed or max(records.values(), key=branch_order).position  # without a majority, or at step 0


def believed_by_a_newcomer(
    records: Records, trusted: frozenset[PeerId], poll: Callable[[Records], Poll]
) -> dict[PeerId, PeerRecord]:
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


def _voters_among(records: Records) -> dict[PeerId, str]:
    """The peers beyond step 0, each with the name of its vote: those with an address, or all if none has one."""
    learnt = {peer_id: record for peer_id, record in records.items() if record.position.step}
    voters = {peer_id: voter_of(peer_id, record.addresses) for peer_id, record in learnt.items() if record.addresses}
    return voters or {peer_id: str(peer_id) for peer_id in learnt}


def voter_of(peer_id: PeerId, addresses: Sequence[str]) -> str:
    """The name of a peer's vote by the addresses that it claims: the network of the first public one, else its id."""
    for address in readable_addresses(addresses):
        if address.protocol.startswith("ip") and address.is_public:
            return network_of(address.host)
    return peer_id
