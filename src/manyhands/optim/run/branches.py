"""Chooses the branch of the run that a peer should be on, from the others' records. Pure; times are loop times.

The branch with the highest (global step, samples in its lineage, digest) leads. But no single signed record may decide
which model all peers hold (docs/adr/0018-weights-and-belief.md). A peer believes a branch that is ahead of it when

* at least half of the members and former members of its roster are ahead on it, of those that are still there and this
  peer; or, without a roster, as a newcomer or in a grid,
* more than half of the peers that it met in committed rounds and that are still there are; or else, without a roster or
  in the first ``FOUNDING_ROUNDS`` steps of a run,
* at least half of all peers that have learnt anything are, itself included. Of these only peers count that it has
  reached: see :func:`sample`, and :mod:`manyhands.optim.run.canvass`, which dials them.

A peer that has made no step yet, such as a newcomer or an evaluator, believes more than half of the initial peers that
it was given, of those that train in the run. If none does, all peers are counted as above.

The peers of a higher branch that has less than half of all peers follow the others after a while.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from manyhands.averaging.messages import Position, readable_addresses
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.roster import Roster
from manyhands.averaging.timing import DIAL_S, SHUN_S, STALL_S
from manyhands.base.identity import PeerId
from manyhands.dht.networks import network_of
from manyhands.optim.run.progress import Claim, branch_order

logger = logging.getLogger(__name__)

LAG_STEPS = 2
"""Records are read late, so peers on one branch may appear up to this many steps apart."""
MAX_MET = 4096
MAX_BEEN_AT = 256
FOUNDING_ROUNDS = 16
"""Of a run. Until then it may have been begun twice, by peers that did not know each other, and no peer is in both
rosters: so others count beside the members."""
ENOUGH_VOTES = 32
"""Of more networks, this many decide, chosen at random: in a large run no peer dials all others."""

Records = Mapping[PeerId, PeerRecord]


@dataclass(frozen=True)
class Branch:
    """A position of the run, and the holders of its state."""

    position: Position
    holders: tuple[PeerId, ...]


def leading_branch(others: Records, own_id: PeerId, own: PeerRecord) -> Branch:
    """The branch that all peers should be on: the one with the highest (global step, samples in its lineage, digest).

    At step 0 nothing has been learnt yet, and the highest claim wins (docs/adr/0030-initial-parameters.md). Of equal
    claims the lowest peer id does: of the trainers that can be dialled, so that all can follow; without any, of the
    auxiliary peers; without these, of all.
    """
    candidates = {**others, own_id: own}
    best = max(candidates.values(), key=branch_order)
    if best.position.step == 0:
        candidates = {peer_id: record for peer_id, record in candidates.items() if record.claim == best.claim}
        hosts = {peer_id: record for peer_id, record in candidates.items() if not record.is_client}
        trainers = {peer_id: record for peer_id, record in hosts.items() if not record.is_auxiliary}
        candidates = trainers or hosts or candidates
        best = candidates[min(candidates)]
    return Branch(best.position, tuple(sorted(one for one in candidates if candidates[one].position == best.position)))


class _Electorate(NamedTuple):
    """The voters, each with the name of its vote, which several may share.

    Attributes:
        num_votes: of all, with those of the ``num_open`` peers that are still to be dialled, which may be for anything.
    """

    voters: Mapping[PeerId, str]
    num_votes: int
    is_half_enough: bool
    num_open: int = 0

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


class Judgement(NamedTuple):
    """The peers that claim to be ahead on a branch that this peer does not follow now."""

    doubted: frozenset[PeerId] = frozenset()  # too few others are on their branch
    open: frozenset[PeerId] = frozenset()  # this peer must reach more peers before it can tell


def poll_of_claims(records: Records) -> Poll:
    """Counts the networks of the addresses that peers claim, for one that only watches."""
    return Poll(_voters_among(records), num_open=0)


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

    def _members(self) -> frozenset[PeerId]:
        """The members and former members of the roster, once this peer has been in a round; empty without one."""
        roster = self.roster() if self._has_stepped else None
        return roster.members.union(roster.former) if roster is not None and roster.members else frozenset()

    def judge(self, own: PeerRecord, records: Records) -> Judgement:
        """Judge the peers that claim to be ahead."""
        ahead = {peer_id: record.position for peer_id, record in records.items() if is_ahead(record, own)}
        if not any(position.step for position in ahead.values()):
            return Judgement()  # nothing has been learnt yet
        believed = None
        for electorate in self._electorates(own, records):
            if electorate.num_open:
                believed = electorate.agreed(ahead)
                if believed is None:
                    return Judgement(open=frozenset(ahead))
            elif (believed := electorate.believed(ahead)) is not None:
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
            for electorate in self._electorates(own, records):
                if electorate.num_open:
                    return None  # for a moment; it does not begin anew
                if electorate._replace(is_half_enough=False).is_enough(elsewhere):
                    self._outvoted_since = min(self._outvoted_since, now)
                    return electorate.most_voted(elsewhere) if now >= self._outvoted_since + STALL_S else None
        self._outvoted_since = math.inf
        return None

    def judges(self, own: PeerRecord, records: Records) -> Poll:
        """The peers that tell which parameters are right: members, else initial peers, else one of each network."""
        for electorate in self._electorates(own, records):
            if electorate.voters:
                each = {vote: peer_id for peer_id, vote in electorate.voters.items()}
                return Poll({peer_id: vote for vote, peer_id in each.items()}, electorate.num_open)
        return Poll({}, num_open=0)

    def _electorates(self, own: PeerRecord, records: Records) -> Iterator[_Electorate]:
        members = self._members()
        met = {peer_id: str(peer_id) for peer_id in (members or self._met.keys()) if peer_id in records}
        is_member = self._own_id in members
        if is_member:
            met.pop(self._own_id, None)
        yield _Electorate(met, len(met) + is_member, is_half_enough=bool(members))
        if not self._has_stepped:
            learnt = {peer_id for peer_id in self.initial_peers() & records.keys() if records[peer_id].position.step}
            if learnt:
                yield _Electorate({peer_id: str(peer_id) for peer_id in learnt}, len(learnt), is_half_enough=False)
                return
        is_own_counted = self._has_stepped and own.position.step > 0
        is_young = own.position.step <= FOUNDING_ROUNDS or self._outvoted_since < math.inf  # it has met the others
        if members and met and not is_young:
            return
        poll = self.poll(records)
        num_votes = len(set(poll.voters.values())) + is_own_counted + poll.num_open
        yield _Electorate(poll.voters, num_votes, is_half_enough=True, num_open=poll.num_open)


def sample(
    records: Records, vote_of: Callable[[PeerId, PeerRecord], str | None], rank: Callable[[PeerId], float]
) -> tuple[dict[PeerId, str], list[PeerId]]:
    """The peers that vote on where the run is, each with the name of its vote, and those that must be dialled first.

    Peers that have an address vote if they were reached. Without any of these, peers without an address vote. Of many
    networks ``ENOUGH_VOTES`` are enough.

    Args:
        vote_of: the name of the vote of a peer that was reached; empty if it cannot be, None if it was not dialled yet.
        rank: a random number for each peer, which stays the same. Nobody else knows it.
    """
    learnt = {peer_id: record for peer_id, record in records.items() if record.position.step}
    in_order = [peer_id for peer_id, record in learnt.items() if record.addresses]
    if len(in_order) > ENOUGH_VOTES:  # one of each network that they claim, then another one of each
        turns: dict[str, itertools.count[int]] = defaultdict(itertools.count)
        in_order.sort(key=rank)
        in_order.sort(key=lambda peer_id: next(turns[voter_of(peer_id, learnt[peer_id].addresses)]))
    voters: dict[PeerId, str] = {}
    votes: set[str] = set()
    undialled: list[PeerId] = []
    for peer_id in in_order:
        if (vote := vote_of(peer_id, learnt[peer_id])) is None:
            undialled.append(peer_id)
        elif vote:
            voters[peer_id] = vote
            votes.add(vote)
            if len(votes) == ENOUGH_VOTES:
                break
    if not voters and not undialled:
        found = {peer_id: vote_of(peer_id, record) for peer_id, record in learnt.items() if not record.addresses}
        voters = {peer_id: vote for peer_id, vote in found.items() if vote}
    return voters, undialled


def _voters_among(records: Records) -> dict[PeerId, str]:
    """The peers that have learnt anything, each with the name of its vote."""
    learnt = {peer_id: record for peer_id, record in records.items() if record.position.step}
    voters = {peer_id: voter_of(peer_id, record.addresses) for peer_id, record in learnt.items() if record.addresses}
    return voters or {peer_id: str(peer_id) for peer_id in learnt}


def held_by_most(records: Records) -> Position:
    """The highest position that more than half of the peers are at, or were shortly before, for one that only watches.

    Args:
        records: of at least one peer.
    """
    voters = _voters_among(records)
    electorate = _Electorate(voters, len(set(voters.values())), is_half_enough=False)
    believed = electorate.believed({peer_id: record.position for peer_id, record in records.items()})
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
    doubted, still_open = Belief(PeerId(""), lambda: trusted, poll).judge(nowhere, records)
    return {} if still_open else {peer_id: record for peer_id, record in records.items() if peer_id not in doubted}


def is_ahead(record: PeerRecord, own: PeerRecord) -> bool:
    """Whether a record is of a higher branch."""
    return record.position != own.position and branch_order(record) > branch_order(own)


def voter_of(peer_id: PeerId, addresses: Sequence[str]) -> str:
    """The name of a peer's vote by what it claims: the network of its public address; else its own id."""
    for address in readable_addresses(addresses):
        if address.protocol.startswith("ip") and address.is_public:
            return network_of(address.host)
    return peer_id


def vote_from(host: str, name: str) -> str:
    """The name of the vote of a peer that was reached: its network, which peers of one owner share.

    In a local network each machine has a vote; on this machine, each ``name``.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return name
    return network_of(host) if address.is_global else host


def _not_followed(claims: Records) -> str:
    first, step = min(claims), max(record.position.step for record in claims.values())
    if len(claims) == 1:
        return f"Peer {first} claims that the run is at step {step}, but too few others do: it is not followed"
    return (
        f"{len(claims)} peers, {first} among them, claim that the run is at step {step}, but too few of those that "
        "train with this peer do: they are not followed. If they are no strangers, the run was begun twice: restart "
        "the peers on this side, which then load the state of the others"
    )


class _Shunned(NamedTuple):
    until: float
    reason: str
    is_beyond_start: bool  # it claimed to be beyond step 0


class BranchChoice:
    """Chooses one peer's branch from the records given to the last :meth:`look`.

    Attributes:
        belief: decides which claims of the others this peer believes.
        believed: the others' records, without peers ahead on a branch that this peer does not believe in, or not yet.
        is_joining: this peer does not train yet.
        seen: the highest global step that each other peer was at, as this one has seen at step 0 itself, also if it is
            gone: by the record of a peer that it believes, or by a state that it began to download.
    """

    def __init__(self, own_id: PeerId, own: PeerRecord, is_connected: Callable[[PeerId], bool]) -> None:
        self.belief = Belief(own_id)
        self.believed: Records = {}
        self.is_joining = True
        self.seen: dict[PeerId, int] = {}
        self._own_id = own_id
        self._own = own
        self._is_connected = is_connected
        self._records: Records = {}
        self._plausible: Records = {}  # the believed ones, and those of which it cannot tell yet
        self._doubted_since: dict[PeerId, float] = {}  # infinite once logged
        self._shunned: dict[PeerId, _Shunned] = {}
        self._majority: Position | None = None  # the position of most peers, which are not on this peer's branch

    def look(self, own: PeerRecord, records: Records, now: float) -> None:
        """Judge again, after a change of the others' records or this peer's position."""
        self._own, self._records = own, records
        if own.position not in self.belief.been_at:
            self.belief.been_at.append(own.position)
        self._majority = self.belief.other_majority(own, records, now)
        doubted, still_open = self.belief.judge(own, records)
        self._doubted_since = {peer_id: self._doubted_since.get(peer_id, now) for peer_id in doubted}
        # some are not believed for a moment, until others are read as well
        to_log = sorted(one for one in doubted if now >= self._doubted_since[one] + DIAL_S)
        if to_log:
            self._doubted_since.update(dict.fromkeys(to_log, math.inf))
            logger.warning("%s", _not_followed({peer_id: records[peer_id] for peer_id in to_log}))
        self._shunned = {peer_id: shunned for peer_id, shunned in self._shunned.items() if shunned.until > now}
        shunned = {peer_id for peer_id in self._shunned.keys() & records.keys() if is_ahead(records[peer_id], own)}
        self._plausible = {peer: record for peer, record in records.items() if peer not in doubted | shunned}
        self.believed = {peer: record for peer, record in self._plausible.items() if peer not in still_open}
        if own.position.step == 0 and (self.is_joining or own.claim < Claim.BEGAN):
            # one whose user says that it begins the run waits for nobody that it has not reached
            seen = self._plausible if self._is_new and own.claim is not Claim.TOLD else self.believed
            for peer_id, record in seen.items():
                if record.position.step:
                    self.note(peer_id, record.position.step)

    @property
    def seen_step(self) -> int:
        """The highest global step of the run that this peer has seen, while it was at step 0; 0 if none."""
        return max(self.seen.values(), default=0)

    def note(self, peer_id: PeerId, step: int) -> None:
        """Remember that another peer was at a global step."""
        if peer_id in self.seen or len(self.seen) < MAX_MET:
            self.seen[peer_id] = max(step, self.seen.get(peer_id, 0))

    def shun(self, peer_id: PeerId, now: float, reason: str) -> None:
        """Ignore a peer's claims of a better branch: it sent an unusable state."""
        record = self._records.get(peer_id)
        self._shunned[peer_id] = _Shunned(now + SHUN_S, reason, record is None or record.position.step > 0)
        self.seen.pop(peer_id, None)

    def refusal(self) -> str:
        """Why this peer must not begin a branch: it refused the state of all that are ahead. Empty if it may.

        A peer that has learnt anything, or has begun the run, goes on: peers with a bad state must not be able to stop
        it.
        """
        here = self._own.position
        if here.step or self._own.claim >= Claim.BEGAN or self.best().position != here:
            return ""
        if any(one.position == here for one in self.believed.values()):
            return ""
        return next((shunned.reason for shunned in self._shunned.values() if shunned.is_beyond_start), "")

    def can_hand_out(self, peer_id: PeerId) -> bool:
        """Whether this peer could get another one's state; a client must be connected for that."""
        record = self._records.get(peer_id)
        if record is None or not record.is_client:
            return record is not None
        return not self._own.is_client and self._is_connected(peer_id)

    def leading(self, without_state: Collection[PeerId]) -> Branch:
        """The branch that this peer should be on, among those whose state others than these can send."""
        believed = {peer_id: self.believed[peer_id] for peer_id in self.believed if peer_id not in without_state}
        return self._chosen(self._within_reach(believed))

    def best(self) -> Branch:
        """The best known branch, whether or not this peer can tell already.

        Only a newcomer waits for a branch whose state it cannot get: from clients, until one has connected to it.
        """
        return self._chosen(self._plausible if self._is_new else self._within_reach(self._plausible))

    @property
    def _is_new(self) -> bool:
        return not (self._own.is_client or self._own.samples or self._own.position.step)

    def waits_for_clients(self) -> bool:
        """Whether only clients have the state that this peer needs: one of them must connect to it."""
        best = self.best()
        return best.position != self._own.position and not any(map(self.can_hand_out, best.holders))

    def _chosen(self, others: Records) -> Branch:
        """The branch of most peers, if they do not follow the one that this peer is on; else the leading one."""
        holders = [
            peer_id for peer_id, record in sorted(self._records.items())
            if record.position == self._majority and peer_id not in self._shunned and self.can_hand_out(peer_id)
        ]  # fmt: skip
        if self._majority is not None and holders:
            return Branch(self._majority, tuple(holders))
        return leading_branch(others, self._own_id, self._own)

    def _within_reach(self, records: Records) -> Records:
        """These records without peers on other branches whose state is not available."""
        here = self._own.position
        return {one: record for one, record in records.items() if record.position == here or self.can_hand_out(one)}
