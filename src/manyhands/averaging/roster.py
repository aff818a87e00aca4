"""The roster of a run: which peers are its members, by the manifests of its committed rounds alone. Pure.

All peers at one position have seen the same manifests, so they have the same roster (docs/adr/0031-one-roster.md).

=================================================  ==================================================================
in a committed round a peer                        its standing after it
=================================================  ==================================================================
gave all its values, and reduced what it owned     ``complete`` rises by one, ``missed`` is 0
was accused by two members, or led an attempt      it is a guest, and ``complete`` is 0; of the members at most a
that failed                                        third in one round
was accused by one member, which accuses it alone  both stay as they were
accuses several that nobody else accuses           it is a guest, and ``complete`` is 0; the others count as complete
was not in the group                               ``missed`` rises by one; beyond ``MAX_MISSED`` it leaves
=================================================  ==================================================================

A guest with ``QUALIFYING`` complete rounds becomes a member, in a calm round, and only so many of them in one round. If
the complete peers are not more than half of the members, nothing changes, as the round may be that of a split. After
``MAX_FROZEN`` such rounds in a row the contributors are the members of a roster that is founded anew.

A round is *troubled* if a member was demoted in it or was waited for in vain, or if a leader was skipped. Trouble in
the last rounds halves the patience of all, and ends the time in which guests become members, whoever caused it. So many
identities together cost a run no more than a few (``benchmarks/roster_attacks.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import msgspec

from manyhands.base.identity import PeerId

QUALIFYING = 3
"""Complete rounds after which a guest may become a member."""
MAX_MISSED = 8
"""Rounds in a row that a peer may miss before it leaves the roster."""
MAX_FROZEN = 16
"""Rounds in a row without a majority of the members, after which the roster is founded anew."""
MEMORY = 16
"""Rounds that count as recent."""
MEMBERS_FOR_TROUBLE = 16
"""One troubled round in ``MEMORY`` is calm; so is one more for each so many members."""
MAX_HALVINGS = 4
"""The patience for a member is at least a sixteenth."""
MAX_FORMER = 256
"""Members that left, and still count where a run has split."""


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """The standing of one peer.

    Attributes:
        complete: committed rounds in which it did its whole part, since it last failed to; at most ``QUALIFYING``.
        missed: committed rounds in a row without it.
        led: the number of the last round that it led or should have led, or in which it became a member.
        is_member: whether it leads, is waited for, and counts where the peers of the run disagree.
        can_lead: whether it could be dialled in the last round with it.
    """

    complete: int = 0
    missed: int = 0
    led: int = 0
    is_member: bool = False
    can_lead: bool = False


class Attendance(msgspec.Struct, frozen=True):
    """What a manifest says of the members of its group.

    Attributes:
        leader: of the attempt that committed.
        attempt: from 0; the leaders of the attempts before failed to lead.
        group: who can lead, by peer id, of the group as it first formed.
        accused: by whom a peer was accused, of those that are still in the group: because its values for a span did not
            come, or its means.
        is_late: the group was closed when its time was over, without a member.
    """

    leader: PeerId
    attempt: int
    group: Mapping[PeerId, bool]
    accused: Mapping[PeerId, Collection[PeerId]] = {}
    is_late: bool = False


class Judged(msgspec.Struct, frozen=True):
    """Who did its part in a round, and who is at fault; of the others of the group one cannot tell."""

    complete: frozenset[PeerId]
    at_fault: frozenset[PeerId]


def judged(attendance: Attendance, skipped: Iterable[PeerId] = ()) -> Judged:
    """Judge the group of a round.

    Args:
        skipped: the leaders of the attempts that failed.
    """
    by_accuser: dict[PeerId, set[PeerId]] = defaultdict(set)
    at_fault = set(skipped)
    unclear: set[PeerId] = set()
    for accused, accusers in attendance.accused.items():
        others = set(accusers) - {accused}
        if len(others) > 1:
            at_fault.add(accused)
        elif others:
            by_accuser[next(iter(others))].add(accused)
    for accuser, accused_alone in by_accuser.items():
        if len(accused_alone) > 1:
            at_fault.add(accuser)
        else:
            unclear |= {accuser, *accused_alone}
    return Judged(
        frozenset(attendance.group.keys() - at_fault - unclear),
        frozenset(at_fault),
    )


class Roster(msgspec.Struct, frozen=True):
    """The members of a run and its guests, at one position.

    Attributes:
        round: number of the last committed round.
        troubled: of the last rounds, the newest first, whether there was trouble in each.
        frozen: rounds in a row that changed nothing, as less than half of the members were in them.
        former: members that have left, the last ones at the end.
    """

    standings: dict[PeerId, Standing] = {}
    round: int = 0
    troubled: tuple[bool, ...] = ()
    frozen: int = 0
    former: tuple[PeerId, ...] = ()

    # queries

    @property
    def members(self) -> frozenset[PeerId]:
        """The peers that lead, are waited for, and are believed."""
        return frozenset(peer_id for peer_id, standing in self.standings.items() if standing.is_member)

    def leaders(self, strangers: Iterable[PeerId] = ()) -> list[PeerId]:
        """Who leads the next round: attempt ``n`` is led by the peer at this place of the list, in turns.

        Members come first, the one that led longest ago at the head; then guests, with more complete rounds first; then
        strangers that can be dialled, by peer id.
        """
        able = [(peer_id, standing) for peer_id, standing in self.standings.items() if standing.can_lead]
        members = [(standing.led, peer_id) for peer_id, standing in able if standing.is_member]
        guests = [(-standing.complete, peer_id) for peer_id, standing in able if not standing.is_member]
        known = [peer_id for _, peer_id in sorted(members)] + [peer_id for _, peer_id in sorted(guests)]
        return known + sorted(set(strangers) - self.standings.keys())

    @property
    def is_calm(self) -> bool:
        """Whether guests may become members: there was little trouble lately, for so many members."""
        return sum(self.troubled) <= 1 + len(self.members) // MEMBERS_FOR_TROUBLE

    def patience(self, attempt: int = 0) -> float:
        """The share of the full patience for a member that does not come or does not get on, in an attempt."""
        return 0.5 ** min(sum(self.troubled) + attempt, MAX_HALVINGS)

    def electorate(self, theirs: Roster) -> frozenset[PeerId]:
        """The peers that decide between the branch of this roster and another one, from this side.

        Those that are in both rosters, if they are more than half of the own members and former members; else the own
        ones. A peer that left in a split still counts here.
        """
        own = self.members | set(self.former)
        both = own & (theirs.members | set(theirs.former))
        return both if 2 * len(both) > len(own) else own

    # the next one

    def after(self, attendance: Attendance) -> Roster:
        """The roster after a committed round."""
        number = self.round + 1
        skipped = set(self.leaders()[: attendance.attempt])
        result = judged(attendance, skipped)
        members = self.members
        if not members:
            return self._founded(result.complete, attendance, number)
        if 2 * len(result.complete & members) <= len(members):
            if self.frozen + 1 >= MAX_FROZEN:
                return self._founded(result.complete, attendance, number)
            return msgspec.structs.replace(self, round=number, frozen=self.frozen + 1)
        at_fault = sorted(result.at_fault & members, key=lambda peer_id: (peer_id not in skipped, peer_id))
        demoted = frozenset(at_fault[: len(members) // 3])  # a round alone does not change who most members are
        standings: dict[PeerId, Standing] = {}
        left: list[PeerId] = []
        for peer_id, standing in self.standings.items():
            has_led = peer_id == attendance.leader or peer_id in skipped
            led = number if has_led else standing.led
            can_lead = attendance.group.get(peer_id, standing.can_lead)
            is_here = peer_id in attendance.group
            is_at_fault = peer_id in demoted or (peer_id in result.at_fault and not standing.is_member)
            if is_at_fault:
                changed = Standing(0, 0 if is_here else standing.missed + 1, led, False, can_lead)
            elif peer_id in result.complete:
                complete = min(standing.complete + 1, QUALIFYING)
                changed = Standing(complete, 0, led, standing.is_member, can_lead)
            else:  # it was not there, or one cannot tell what it did
                missed = 0 if is_here else standing.missed + 1
                changed = Standing(standing.complete, missed, led, standing.is_member, can_lead)
            if changed.missed > MAX_MISSED:
                left += [peer_id] if standing.is_member else []
            else:
                standings[peer_id] = changed
        for peer_id in sorted(result.complete - standings.keys()):
            standings[peer_id] = Standing(1, can_lead=attendance.group[peer_id])
        is_troubled = bool(demoted) or attendance.is_late or attendance.attempt > 0
        troubled = (is_troubled, *self.troubled)[:MEMORY]
        former = tuple(peer_id for peer_id in self.former if peer_id not in standings) + tuple(sorted(left))
        after = Roster(standings, number, troubled, 0, former[-MAX_FORMER:])
        return after._with_new_members()

    def _with_new_members(self) -> Roster:
        """Promote guests that qualify, if it is calm: at most a quarter of the members, and at least one."""
        if not self.is_calm:
            return self
        qualified = [
            peer_id
            for peer_id, standing in sorted(self.standings.items())
            if standing.complete >= QUALIFYING and not standing.is_member and standing.missed == 0
        ]
        promoted = qualified[: max(1, len(self.members) // 4)]
        standings = dict(self.standings)
        for peer_id in promoted:
            standings[peer_id] = msgspec.structs.replace(standings[peer_id], is_member=True, led=self.round)
        return msgspec.structs.replace(self, standings=standings)

    def _founded(self, founders: Collection[PeerId], attendance: Attendance, number: int) -> Roster:
        """A roster whose members are the contributors of a round."""
        standings = {
            peer_id: Standing(
                QUALIFYING,
                led=number if peer_id == attendance.leader else 0,
                is_member=True,
                can_lead=attendance.group[peer_id],
            )
            for peer_id in sorted(founders)
        }
        former = [peer_id for peer_id in (*self.former, *sorted(self.members)) if peer_id not in standings]
        return Roster(standings, number, former=tuple(dict.fromkeys(former))[-MAX_FORMER:])
