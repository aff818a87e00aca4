"""Decides whom a peer believes about where the run is. Pure; times are loop times.

No single signed record may decide which model all peers hold (docs/adr/0018-weights-and-belief.md). Of the peers that
are there, these decide (:func:`electorates`, docs/adr/0036-newcomers-follow-their-initial-peers.md); "else" means that
too few of the first ones are on any branch that is ahead.

==========================================================  ===========================================================
a peer                                                      who decides
==========================================================  ===========================================================
has made no step, and one of its initial peers trains       the initial peers that train
has made no step                                            the networks
has made a step, and members of its roster are there        the members
likewise, in the first ``FOUNDING_ROUNDS`` steps of a run,  the members; else the networks
or while most others are elsewhere
has made a step, and has no roster, as in a grid            the peers met in rounds, if any; else the networks
has made a step, and no member of its roster is there       the networks
==========================================================  ===========================================================

=============  ===================================================================  ===================================
who            are                                                                  how many decide
=============  ===================================================================  ===================================
initial peers  those that this peer was given to join by                            more than half
members        of its roster, also former ones; this peer too, if it is one         half
peers met      in committed rounds                                                  more than half
networks       in which this peer has reached peers that have learnt anything       half
               (:mod:`.canvass`); its own, once it has learnt anything too
=============  ===================================================================  ===================================

To a branch that is not ahead a peer follows only more than half of them, after a while (:meth:`Belief.other_majority`).
"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
MAX_BEEN_AT = 256
FOUNDING_ROUNDS = 16
"""Of a run. Until then it may have been begun twice, by peers that did not know each other, and no peer is in both
rosters: so others count beside the members."""

Records = Mapping[PeerId, PeerRecord]


# who decides


class Electorate(enum.Enum):
    """Those who may decide."""

    INITIAL_PEERS = "initial peers"
    MEMBERS = "members"
    MET = "peers met"
    NETWORKS = "networks"


@dataclass(frozen=True)
class Known:
    """What a peer knows of those who may decide.

    Attributes:
        step: its global step.
        has_stepped: it has made a step itself.
        is_outvoted: most others were elsewhere at the last look.
        is_member: of the roster of its run.
        members, met, initial_peers: the others that are there; the peers met only without a roster, and of the initial
            peers those that train.
    """

    step: int = 0
    has_stepped: bool = False
    is_outvoted: bool = False
    is_member: bool = False
    members: frozenset[PeerId] = frozenset()
    met: frozenset[PeerId] = frozenset()
    initial_peers: frozenset[PeerId] = frozenset()


def electorates(known: Known) -> list[Electorate]:
    """Those who decide, in order; the table at the head of this file."""
    if not known.has_stepped:
        return [Electorate.INITIAL_PEERS] if known.initial_peers else [Electorate.NETWORKS]
    if known.members:
        may_be_two = known.step <= FOUNDING_ROUNDS or known.is_outvoted
        return [Electorate.MEMBERS, Electorate.NETWORKS] if may_be_two else [Electorate.MEMBERS]
    return [Electorate.MET, Electorate.NETWORKS] if known.met else [Electorate.NETWORKS]


class Votes(NamedTuple):
    """The votes of one electorate.

    Attributes:
        voters: each with the name of its vote, which several may share.
        num_votes: of all, with those of the ``num_open`` peers that are still to be dialled, which may be for anything.
    """

    voters: Mapping[PeerId, str]
    num_votes: int
    is_half_enough: bool
    num_open: int = 0

    @classmethod
    def of(cls, peers: Iterable[PeerId], *, num_more: int = 0, is_half_enough: bool = False) -> Votes:
        """One vote for each peer; ``num_more`` are for none of the claims."""
        voters = {peer_id: str(peer_id) for peer_id in sorted(peers)}
        return cls(voters, len(voters) + num_more, is_half_enough)

    def is_enough(self, peers: Iterable[PeerId]) -> bool:
        num = len({self.voters[peer_id] for peer_id in peers if peer_id in self.voters})
        return num > 0 and (2 * num > self.num_votes or (self.is_half_enough and 2 * num == self.num_votes))

    def believed(self, ahead: Mapping[PeerId, Position]) -> Position | None:
        """The highest position that enough voters are at, or were shortly before; None without one."""
        for highest in sorted({position.step for position in ahead.values()}, reverse=True):
            up_there = [peer_id for peer_id, position in ahead.items() if position.step >= highest - LAG_STEPS]
            if self.is_enough(up_there):
                near = {peer_id: ahead[peer_id] for peer_id in up_there if ahead[peer_id].step <= highest}
                return self.most_voted(near) if not self.voters.keys().isdisjoint(near) else None
        return None

    def agreed(self, ahead: Mapping[PeerId, Position]) -> Position | None:
        """The position of more than half, which those that are still to be dialled cannot change; None without one."""
        if self.voters.keys().isdisjoint(ahead):
            return None
        position = self.most_voted(ahead)
        there = [peer_id for peer_id in ahead if ahead[peer_id] == position]
        return position if self._replace(is_half_enough=False).is_enough(there) else None

    def most_voted(self, positions: Mapping[PeerId, Position]) -> Position:
        """The position with the most votes; of several the lowest, so that no peer alone can lift itself up."""
        told = {(position, self.voters[peer_id]) for peer_id, position in positions.items() if peer_id in self.voters}
        votes = Counter(position for position, _ in told)
        return min(votes, key=lambda position: (-votes[position], position.step, position.lineage))


class Poll(NamedTuple):
    """The peers whose votes count, each with the name of its vote."""

    voters: Mapping[PeerId, str]
    num_open: int  # peers that are still to be dialled; 1 if nobody votes, until somebody does


def poll_of_claims(records: Records) -> Poll:
    """Counts the networks of the addresses that peers claim, for one that only watches."""
    return Poll(_voters_among(records), num_open=0)


# whom to believe


class Judgement(NamedTuple):
    """The peers that claim to be ahead on a branch that this peer does not follow now."""

    unbelieved: frozenset[PeerId] = frozenset()  # too few others are on their branch
    undecided: frozenset[PeerId] = frozenset()  # this peer must reach more peers before it can tell


class Belief:
    """Decides which of the others' claims about other positions one peer believes.

    Args:
        initial_peers: returns those that this peer was given to join by.
        poll: returns which of all peers vote, from their records.

    Attributes:
        roster: returns that of the run at this peer's position; None where peers share none.
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
        self._met: dict[PeerId, None] = {}  # the last ones at the end
        self.been_at: deque[Position] = deque(maxlen=MAX_BEEN_AT)  # this peer, now and before
        self._has_stepped = False
        self._outvoted_since = math.inf

    def record_step(self, members: Iterable[PeerId]) -> None:
        """Record a step of this peer, with the others in it, if any."""
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
        """The peers met last."""
        return list(self._met)[-num:]

    def judge(self, own: PeerRecord, records: Records) -> Judgement:
        """Judge the peers that claim to be ahead."""
        ahead = {peer_id: record.position for peer_id, record in records.items() if is_ahead(record, own)}
        if not any(position.step for position in ahead.values()):
            return Judgement()  # nothing has been learnt yet
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
        """The position of most peers for a while, if this peer was never there and does not follow them at once."""
        elsewhere = {
            peer_id: record.position for peer_id, record in records.items()
            if record.position.step and record.position not in (own.position, *self.been_at)
            and not is_ahead(record, own)
        }  # fmt: skip
        if own.position.step and elsewhere:
            for votes in self._votes(own, records):
                if votes.num_open:
                    return None  # for a moment; it does not begin anew
                if votes._replace(is_half_enough=False).is_enough(elsewhere):
                    self._outvoted_since = min(self._outvoted_since, now)
                    return votes.most_voted(elsewhere) if now >= self._outvoted_since + STALL_S else None
        self._outvoted_since = math.inf
        return None

    def judges(self, own: PeerRecord, records: Records) -> Poll:
        """The peers that tell which parameters are right: members, else initial peers, else one of each network."""
        for votes in self._votes(own, records):
            if votes.voters:
                each = {vote: peer_id for peer_id, vote in votes.voters.items()}
                return Poll({peer_id: vote for vote, peer_id in each.items()}, votes.num_open)
        return Poll({}, num_open=0)

    def _votes(self, own: PeerRecord, records: Records) -> Iterator[Votes]:
        """The votes of those who decide, in order. The networks are dialled only if they are asked."""
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
    """Whether a record is of a higher branch."""
    return record.position != own.position and branch_order(record) > branch_order(own)


# peers that have no part in rounds


def held_by_most(records: Records) -> Position:
    """The highest position that more than half of the peers are at, or were shortly before, for one that only watches.

    Args:
        records: of at least one peer.
    """
    voters = _voters_among(records)
    votes = Votes(voters, len(set(voters.values())), is_half_enough=False)
    believed = votes.believed({peer_id: record.position for peer_id, record in records.items()})
    return believed or max(records.values(), key=branch_order).position  # if nothing has been learnt yet


def believed_by_a_newcomer(
    records: Records, trusted: frozenset[PeerId], poll: Callable[[Records], Poll]
) -> dict[PeerId, PeerRecord]:
    """The records of the branch that most peers are on, for a peer that has met none, such as an evaluator.

    Empty while it cannot tell.

    Args:
        trusted: of these peers more than half decide, if any of them trains in the run.
    """
    nowhere = PeerRecord(Position(0, b""), is_client=True, addresses=[])
    unbelieved, undecided = Belief(PeerId(""), lambda: trusted, poll).judge(nowhere, records)
    return {} if undecided else {peer_id: record for peer_id, record in records.items() if peer_id not in unbelieved}


def _voters_among(records: Records) -> dict[PeerId, str]:
    """The peers that have learnt anything, each with the name of its vote."""
    learnt = {peer_id: record for peer_id, record in records.items() if record.position.step}
    voters = {peer_id: voter_of(peer_id, record.addresses) for peer_id, record in learnt.items() if record.addresses}
    return voters or {peer_id: str(peer_id) for peer_id in learnt}


def voter_of(peer_id: PeerId, addresses: Sequence[str]) -> str:
    """The name of a peer's vote by what it claims: the network of its public address; else its own id."""
    for address in readable_addresses(addresses):
        if address.protocol.startswith("ip") and address.is_public:
            return network_of(address.host)
    return peer_id
