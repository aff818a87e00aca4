"""The roster of a run: its members, as they follow from the manifests of its committed rounds alone. Pure.

All peers at one position have seen the same manifests, so they have the same roster (docs/adr/0031-one-roster.md). The
lineage of a position covers it.

==================================================  =================================================================
in a committed round a peer                         its standing after it
==================================================  =================================================================
gave values, and was in the last exchange           *complete*: ``complete`` rises by one, ``missed`` is 0, and
                                                    ``contributed`` rises by the weight that it counted for
is accused by two members; or by one, and by        *at fault*: ``complete`` and ``contributed`` are 0, ``faults``
another one in an earlier round                     rises by one; a member is *demoted*: it is a guest that votes
is accused by one member                            it is *doubted*, and else stays as it was; if it is a member, its
                                                    accuser stays as it was, too
should have led before the leader                   its turn is over; it is at fault only if members were late
was left out of the last exchange, or gave a        it stays as it was; with a weight of 0 it is not accused
weight of 0
was not in the group                                ``missed`` rises by one; beyond ``MAX_MISSED`` it leaves. Whether
                                                    others still wait for it is in ``averaging/attendees.py``
==================================================  =================================================================

The manifest says who did what, and each statement has its author:

===========================  =========================================================================================
in the manifest              written by
===========================  =========================================================================================
``parts[].absent``           the reducer of the part, which so accuses the members whose values it lacks; but a member
                             that all of several reducers lack is accused by the leader alone
``Mark.LEFT_OUT``            the leader, which so accuses members that it left out of an exchange (``round/count.py``)
``Mark.IDLE``, a weight      the member itself, when it asked for a place
``leader``, ``members``      the leader, when it closed the group
``late``                     the leader, when it closed the group (``Close`` in ``matchmaking/matchmaking_machine.py``)
===========================  =========================================================================================

Only accusations by members of the roster count, and no accusation by a guest costs a member anything: identities are
free. As long as there are no members, all peers count as such.

The *voters* are the members and those that were demoted. They decide what a round commits and which branch is the
run, and a group waits for them, so nobody takes the votes of others by accusing them (docs/adr/0066). More than half of
the voters are members: beyond that, the one that was demoted first is a member again.

A guest with ``QUALIFYING`` complete rounds becomes a member in a calm round; in one round at most a quarter as many as
there are members, but at least one. If not more than half of the voters were in the group, all standings stay, but for
turns that are over, as the round may be that of a split. After ``MAX_FROZEN`` such rounds in a row all that gave a
weight are the members of a roster that is founded anew, as after the first round.

A member may count for more than the others once it has contributed much: see :meth:`Roster.earned`.

Each fault after the first one bars a guest without a vote from the next rounds; ``GOOD_ROUNDS`` complete rounds take
one fault away.

A round is *troubled* if a member was demoted in it, or if voters were late and the manifest shows it: one of them is
not in the group, or a peer that should have led did not. Each recent troubled round halves the patience of all, and
while there are several, no guest becomes a member, whoever caused them. So many identities together cost a run no more
than a few do (``benchmarks/roster_attacks.py``). Guests are waited for less, too, after a round in which any peer was
waited for in vain.
"""

from __future__ import annotations

import enum
import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated

import msgspec

from manyhands.averaging.messages import (
    MAX_SUM_WEIGHT,
    Count,
    Late,
    Mark,
    PeerIdText,
    Position,
    RoundManifest,
    Weight,
)
from manyhands.base.identity import PeerId
from manyhands.base.structs import make_ready

QUALIFYING = 3
"""Complete rounds after which a guest may become a member, and after which a doubt is forgotten."""
GOOD_ROUNDS = 10
"""Complete rounds that take one fault away."""
ROUNDS_PER_WEIGHT = 10
"""A member's weight may be what it has contributed so far divided by this number, whatever the others give.
So it can grow by a tenth in each round."""
MAX_FAULTS = 2
"""The most faults that are counted. A guest with this number is barred for some rounds after its last fault, unless it
votes."""
BARRED_ROUNDS = 3
"""The number of rounds in which a peer gets no place after a fault that is not its first one."""
MAX_MISSED = 8
"""Rounds in a row that a peer may miss before it leaves the roster."""
MAX_FROZEN = 16
"""Rounds in a row without a majority of the voters, after which the roster is founded anew."""
MEMORY = 16
"""The number of rounds that count as recent."""
MEMBERS_FOR_TROUBLE = 16
"""A run is calm with at most one troubled round among the recent ones, and one more for every 16 members."""
MAX_FORMER = 256
"""Limit of the remembered members that have left: they still count where a run has split."""
MAX_STANDINGS = 4096
"""Limit of the standings in a roster: of more, the guests that have missed the most rounds leave first."""


class Trouble(enum.IntEnum):
    """The trouble in a committed round."""

    NONE = 0
    WAIT = 1  # a peer was waited for in vain
    MEMBER = 2  # the round was troubled: a member was demoted, or a voter was late


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """The standing of one peer.

    Attributes:
        complete: committed rounds in which the peer did its whole part since it was last at fault; set back to
            ``QUALIFYING`` at ``GOOD_ROUNDS``.
        missed: committed rounds in a row without the peer.
        led: the number of the last round that it led or should have led, or in which it became a member.
        is_member: whether it leads in turn, votes, and its accusations count.
        can_lead: whether it could be dialled in the last round with it.
        doubted_by: the member that last accused it alone; empty once it has ``QUALIFYING`` complete rounds after that.
        cleared: the number of complete rounds since that accusation; 0 while it is not doubted.
        faults: how often it was at fault, less those that were taken away; at most ``MAX_FAULTS``.
        fault_round: the number of the round in which it was last at fault.
        contributed: the weight that it has counted for, in all complete rounds since then.
        demoted: the number of the round in which it was demoted; 0 if it is a member, or never was one.
    """

    complete: Count = 0
    missed: Count = 0
    led: Count = 0
    is_member: bool = False
    can_lead: bool = False
    doubted_by: PeerIdText = PeerId("")
    cleared: Count = 0
    faults: Count = 0
    fault_round: Count = 0
    contributed: Weight = 0.0
    demoted: Count = 0

    @property
    def is_voter(self) -> bool:
        """Whether it counts where the peers of the run disagree."""
        return self.is_member or self.demoted > 0

    def completed(self, weight: float) -> Standing:
        """The standing after a round in which the peer did its part, and counted for this weight."""
        complete = self.complete + 1
        faults = self.faults
        if complete >= GOOD_ROUNDS:
            complete = QUALIFYING
            faults = max(faults - 1, 0)
        doubted_by = self.doubted_by
        cleared = self.cleared + 1 if doubted_by else 0
        if cleared >= QUALIFYING:
            cleared = 0
            doubted_by = PeerId("")
        contributed = min(self.contributed + weight, MAX_SUM_WEIGHT)
        return msgspec.structs.replace(
            self,
            complete=complete,
            missed=0,
            faults=faults,
            doubted_by=doubted_by,
            cleared=cleared,
            contributed=contributed,
        )

    def at_fault(self, number: int) -> Standing:
        """The standing after a round with this number, in which the peer was at fault."""
        faults = min(self.faults + 1, MAX_FAULTS)
        return msgspec.structs.replace(
            self, complete=0, is_member=False, faults=faults, fault_round=number, contributed=0.0,
            demoted=number if self.is_member else self.demoted,
        )  # fmt: skip

    def as_member(self, number: int) -> Standing:
        """The standing of the peer as a member from the round with this number on.

        It leads after the others, unless it was demoted before its turn.
        """
        return msgspec.structs.replace(
            self, is_member=True, demoted=0, led=self.led if self.led < self.demoted else number
        )

    def barred_rounds(self, number: int) -> int:
        """For how many rounds the peer gets no place, after the round with this number."""
        is_barred = self.faults == MAX_FAULTS and not self.is_voter
        return max(0, self.fault_round + BARRED_ROUNDS - number) if is_barred else 0


class Attendance(msgspec.Struct, frozen=True):
    """The attendance of a committed round, as its manifest says.

    Attributes:
        group: the members of the group, each with whether it can lead.
        idle: members that gave a weight of 0.
        left_out: members that were not in the last exchange.
        accused: for each accused peer, its accusers; only peers that gave a weight are accused.
        late: the kind of peers that were waited for in vain when the group formed (:class:`Late`).
        weights: what the members counted for; 0 where it is not said, as in a step alone, which nobody else has seen.
    """

    leader: PeerId
    group: Mapping[PeerId, bool]
    idle: Collection[PeerId] = ()
    left_out: Collection[PeerId] = ()
    accused: Mapping[PeerId, Collection[PeerId]] = {}
    late: int = Late.NOBODY
    weights: Mapping[PeerId, float] = {}

    @staticmethod
    def of(manifest: RoundManifest) -> Attendance:
        """Read a manifest."""
        members = manifest.members
        leader = members[manifest.leader]
        reducers = {members[part.reducer] for part in manifest.parts}
        absent_from: dict[int, set[PeerId]] = defaultdict(set)
        for part in manifest.parts:
            for rank in part.absent:
                absent_from[rank].add(members[part.reducer])
        idle, left_out = set[PeerId](), set[PeerId]()
        accused: dict[PeerId, Collection[PeerId]] = {}
        for rank, (peer_id, mark) in enumerate(zip(members, manifest.marks, strict=True)):
            if mark & Mark.LEFT_OUT:
                left_out.add(peer_id)
            if mark & Mark.IDLE:
                idle.add(peer_id)
            else:
                # if no reducer has any of its values, the leader alone says that it is in the group
                is_silent = len(reducers) > 1 and absent_from[rank] == reducers
                accusers = {leader} if mark & Mark.LEFT_OUT or is_silent else absent_from[rank]
                if others := accusers - {peer_id}:
                    accused[peer_id] = frozenset(others)
        group = {peer_id: not mark & Mark.CLIENT for peer_id, mark in zip(members, manifest.marks, strict=True)}
        return Attendance(leader, group, idle, left_out, accused, manifest.late, manifest.contributors())

    @staticmethod
    def alone(peer_id: PeerId, *, can_lead: bool) -> Attendance:
        """The attendance of a step that a peer makes alone."""
        return Attendance(peer_id, {peer_id: can_lead})


class Judged(msgspec.Struct, frozen=True):
    """The peers that did their part in a round, those at fault, and who doubts whom.

    Attributes:
        complete: peers that gave values, were in the last exchange, are neither at fault nor doubted, and do not alone
            accuse a member.
        doubted: for each doubted peer, the member that accuses it.
    """

    complete: frozenset[PeerId]
    at_fault: frozenset[PeerId]
    doubted: Mapping[PeerId, PeerId]


class Roster(msgspec.Struct, frozen=True):
    """The members of a run and its guests, at one position.

    Attributes:
        round: number of the last committed round.
        trouble: in each of the last rounds, the newest first.
        frozen: rounds in a row that changed no standing, as not more than half of the voters were in the group.
        former: voters that have left, the last ones at the end.
    """

    standings: Annotated[dict[PeerIdText, Standing], msgspec.Meta(max_length=MAX_STANDINGS)] = {}
    round: Count = 0
    trouble: Annotated[tuple[Trouble, ...], msgspec.Meta(max_length=MEMORY)] = ()
    frozen: Count = 0
    former: Annotated[tuple[PeerIdText, ...], msgspec.Meta(max_length=MAX_FORMER)] = ()

    # queries

    @property
    def members(self) -> frozenset[PeerId]:
        """The peers that lead, and whose accusations count."""
        return frozenset(peer_id for peer_id, standing in self.standings.items() if standing.is_member)

    @property
    def voters(self) -> frozenset[PeerId]:
        """The peers that are waited for, and count where peers disagree: the members, and those that were demoted."""
        return frozenset(peer_id for peer_id, standing in self.standings.items() if standing.is_voter)

    def leaders(self, strangers: Iterable[PeerId] = ()) -> list[PeerId]:
        """The peers that may lead the next round, in order: the first one leads, or the next that can be reached.

        Members come first, the one that led longest ago at the head; then guests, with more complete rounds first; then
        strangers that can be dialled, by peer id. A peer that is barred does not lead.
        """
        able = [
            (peer_id, standing)
            for peer_id, standing in self.standings.items()
            if standing.can_lead and not standing.barred_rounds(self.round)
        ]
        members = [(standing.led, peer_id) for peer_id, standing in able if standing.is_member]
        guests = [(-standing.complete, peer_id) for peer_id, standing in able if not standing.is_member]
        known = [peer_id for _, peer_id in sorted(members)] + [peer_id for _, peer_id in sorted(guests)]
        return known + sorted(set(strangers) - self.standings.keys())

    def barred_rounds(self, peer_id: PeerId) -> int:
        """For how many of the next rounds a peer gets no place."""
        standing = self.standings.get(peer_id)
        return standing.barred_rounds(self.round) if standing is not None else 0

    def earned(self, peer_id: PeerId) -> float:
        """The weight for which a member may count in any case, as it has contributed much more in earlier rounds."""
        standing = self.standings.get(peer_id)
        return standing.contributed / ROUNDS_PER_WEIGHT if standing is not None and standing.is_member else 0.0

    @property
    def is_calm(self) -> bool:
        """Whether guests may become members: there was little trouble lately, for so many members."""
        return self.num_troubled <= 1 + len(self.members) // MEMBERS_FOR_TROUBLE

    @property
    def waits_for_guests(self) -> bool:
        """Whether guests are waited for as long as a step takes: recent rounds were without any trouble."""
        return not any(self.trouble)

    def hurried(self, group: Collection[PeerId]) -> set[PeerId]:
        """The peers of a group for which nobody waits long in its round.

        They are guests that were at fault or doubted, and after trouble all guests; but those that vote only where the
        other voters are enough for a result. None, if no voter is in the group.
        """
        voters = self.voters.intersection(group)
        if not voters:
            return set()
        hurried = {peer_id for peer_id in group if self._is_hurried(self.standings.get(peer_id, Standing()))}
        return hurried if 2 * len(voters - hurried) > len(voters) else hurried - voters

    def _is_hurried(self, standing: Standing) -> bool:
        return not standing.is_member and bool(standing.faults or standing.doubted_by or self.num_troubled > 0)

    def was_often_at_fault(self, peer_id: PeerId) -> bool:
        """Whether a peer has as many faults as are counted."""
        return self.standings.get(peer_id, Standing()).faults == MAX_FAULTS

    @property
    def num_troubled(self) -> int:
        """How many of the recent rounds were troubled."""
        return self.trouble.count(Trouble.MEMBER)

    def digest(self) -> bytes:
        """SHA-256 of the roster; the order in which its peers were added does not matter."""
        return hashlib.sha256(msgspec.msgpack.encode(self, order="sorted")).digest()

    # the next one

    def after(self, attendance: Attendance) -> Roster:
        """The roster after a committed round."""
        number, voters = self.round + 1, self.voters
        skipped = self._skipped(attendance.leader)
        result = self.judged(attendance)
        if not voters:
            return self._founded(attendance, number)
        if 2 * len(voters & attendance.group.keys()) <= len(voters):
            if self.frozen + 1 >= MAX_FROZEN:
                return self._founded(attendance, number)
            return self._with_turns(attendance, skipped, number)
        here = attendance.group.keys() & (result.complete | result.at_fault | result.doubted.keys())
        known = self.standings.keys() | here
        standings: dict[PeerId, Standing] = {}
        left: list[PeerId] = []
        for peer_id in sorted(known):
            standing = self.standings.get(peer_id, Standing())
            is_here = peer_id in attendance.group
            changed = msgspec.structs.replace(
                standing,
                missed=0 if is_here else min(standing.missed + 1, MAX_MISSED + 1),
                led=number if peer_id == attendance.leader or peer_id in skipped else standing.led,
                can_lead=attendance.group.get(peer_id, standing.can_lead),
            )
            if peer_id in result.at_fault:
                changed = changed.at_fault(number)
            elif peer_id in result.complete:
                changed = changed.completed(attendance.weights.get(peer_id, 0.0))
            elif peer_id in result.doubted:
                changed = msgspec.structs.replace(changed, doubted_by=result.doubted[peer_id], cleared=0)
            if changed.missed <= MAX_MISSED or changed.barred_rounds(number):
                standings[peer_id] = changed
            elif standing.is_voter:
                left.append(peer_id)
        former = tuple(peer_id for peer_id in self.former if peer_id not in standings) + tuple(left)
        after = Roster(
            _limited(_with_most_as_members(standings, number)),
            number,
            (Trouble.MEMBER if result.at_fault & self.members else self._trouble(attendance), *self.trouble)[:MEMORY],
            0,
            former[-MAX_FORMER:],
        )
        return after._with_new_members(result.complete)

    def _with_turns(self, attendance: Attendance, skipped: set[PeerId], number: int) -> Roster:
        """The roster after a round without most voters: only turns that are over, and trouble, are noted."""
        over = skipped | {attendance.leader}
        standings = {
            peer_id: msgspec.structs.replace(standing, led=number) if peer_id in over else standing
            for peer_id, standing in self.standings.items()
        }
        return msgspec.structs.replace(
            self,
            standings=standings,
            round=number,
            trouble=(self._trouble(attendance), *self.trouble)[:MEMORY],
            frozen=self.frozen + 1,
        )

    def _trouble(self, attendance: Attendance) -> Trouble:
        """The trouble before the group formed; late voters must show: one did not lead, or is not in the group."""
        is_shown = self._skipped(attendance.leader) or self.voters - attendance.group.keys()
        if attendance.late == Late.MEMBERS and is_shown:
            return Trouble.MEMBER
        return Trouble.WAIT if attendance.late != Late.NOBODY else Trouble.NONE

    def judged(self, attendance: Attendance) -> Judged:
        """Judge the group of a round that follows this roster."""
        members = self.members or attendance.group.keys()
        at_fault = self._skipped(attendance.leader) if attendance.late == Late.MEMBERS else set()
        doubted: dict[PeerId, PeerId] = {}
        unclear: set[PeerId] = set()
        for accused, accusers in attendance.accused.items():
            believed = [accuser for accuser in accusers if accuser in members]
            earlier = self.standings.get(accused, Standing()).doubted_by
            if len(believed) > 1 or (believed and earlier not in ("", believed[0])):
                at_fault.add(accused)
            elif believed:
                doubted[accused] = believed[0]
                unclear |= {accused, believed[0]} if accused in members else {accused}
        complete = attendance.group.keys() - at_fault - unclear - {*attendance.idle, *attendance.left_out}
        return Judged(frozenset(complete), frozenset(at_fault), doubted)

    def _skipped(self, leader: PeerId) -> set[PeerId]:
        """The peers that should have led before this leader."""
        leaders = self.leaders()
        return set(leaders[: leaders.index(leader)] if leader in leaders else leaders)

    def _with_new_members(self, complete: Collection[PeerId]) -> Roster:
        """Promote guests that qualify by this round, if it is calm: at most a quarter of the members, at least one."""
        if not self.is_calm:
            return self
        qualified = [
            peer_id
            for peer_id, standing in sorted(self.standings.items())
            if standing.complete >= QUALIFYING and not standing.is_member and peer_id in complete
        ]
        promoted = qualified[: max(1, len(self.members) // 4)]
        standings = dict(self.standings)
        for peer_id in promoted:
            standings[peer_id] = standings[peer_id].as_member(self.round)
        return msgspec.structs.replace(self, standings=standings)

    def _founded(self, attendance: Attendance, number: int) -> Roster:
        """A new roster: its members are all that gave a weight in a round, whoever accuses them.

        Their faults are not forgotten.
        """
        standings = {peer_id: one for peer_id, one in self.standings.items() if one.barred_rounds(number)}
        for peer_id in attendance.group.keys() - set(attendance.idle):
            before = self.standings.get(peer_id, Standing())
            standings[peer_id] = Standing(
                QUALIFYING,
                led=number if peer_id == attendance.leader else 0,
                is_member=True,
                can_lead=attendance.group[peer_id],
                faults=before.faults,
                fault_round=before.fault_round,
                contributed=min(before.contributed + attendance.weights.get(peer_id, 0.0), MAX_SUM_WEIGHT),
            )
        standings = _limited(standings)
        former = [peer_id for peer_id in (*self.former, *sorted(self.voters)) if peer_id not in standings]
        return Roster(standings, number, former=tuple(dict.fromkeys(former))[-MAX_FORMER:])


make_ready(Roster)


def _with_most_as_members(standings: Mapping[PeerId, Standing], number: int) -> dict[PeerId, Standing]:
    """Make those members again that were demoted first, until more than half of the voters are members."""
    demoted = sorted((one.demoted, peer_id) for peer_id, one in standings.items() if one.demoted)
    num_members = sum(one.is_member for one in standings.values())
    num_too_many = max((len(demoted) - num_members + 2) // 2, 0)
    again = {peer_id: standings[peer_id].as_member(number) for _, peer_id in demoted[:num_too_many]}
    return {**standings, **again}


def _limited(standings: Mapping[PeerId, Standing]) -> dict[PeerId, Standing]:
    """Keep at most ``MAX_STANDINGS``: voters, then guests that have missed the fewest rounds."""

    def order(peer_id: PeerId) -> tuple[bool, int, int, PeerId]:
        standing = standings[peer_id]
        return (not standing.is_voter, standing.missed, -standing.complete, peer_id)

    return {peer_id: standings[peer_id] for peer_id in sorted(standings, key=order)[:MAX_STANDINGS]}


def check_roster(roster: Roster) -> None:
    """Check a roster that another peer has sent; raises ``ValueError`` if no committed rounds can lead to it."""
    standings = roster.standings.values()
    lengths = (
        (len(standings), MAX_STANDINGS),
        (len(roster.trouble), MEMORY),
        (len(roster.former), MAX_FORMER),
        (roster.frozen, MAX_FROZEN),
    )
    if any(length > most for length, most in lengths):
        raise ValueError(f"its roster has {len(standings)} peers and {len(roster.former)} former ones, or odd counts")
    for peer_id, one in roster.standings.items():
        counts = (
            (one.complete, GOOD_ROUNDS),
            (one.missed, MAX_MISSED + 1),
            (one.cleared, QUALIFYING),
            (one.faults, MAX_FAULTS),
            (one.led, roster.round),
            (one.fault_round, roster.round),
            (one.demoted, roster.round),
            (one.contributed, MAX_SUM_WEIGHT),
        )
        if any(not 0 <= count <= most for count, most in counts) or (one.is_member and one.demoted):
            raise ValueError(f"its roster has impossible counts for peer {peer_id!r}")


# where a committed round leads


def lineage_of(seal: bytes, roster: Roster) -> bytes:
    """The lineage of a position.

    Args:
        seal: digest of the rounds that led there, see :func:`next_place`.
    """
    return lineage_with(seal, roster.digest())


def lineage_with(seal: bytes, digest: bytes) -> bytes:
    """The lineage of a position whose roster has this digest."""
    return hashlib.sha256(seal + digest).digest()


def next_place(position: Position, roster: Roster, manifest: RoundManifest) -> tuple[Position, Roster, bytes]:
    """The position after a committed round of one group, the roster there, and the seal of both."""
    seal = hashlib.sha256(position.lineage + manifest.fingerprint()).digest()
    after = roster.after(Attendance.of(manifest))
    return Position(position.step + 1, lineage_of(seal, after)), after, seal
