"""How long members of a round wait for whom, from the formed group to the verdict. Pure.

In an exchange (:class:`Stragglers`):

==========  =========================================================  =================================================
a partner   when                                                       then
==========  =========================================================  =================================================
is asked    it owes something, and nothing came for ``ANSWER_S``; or   it says whether it is in the round; asked again
            it has not opened its stream after one look                after ``ANSWER_S``
is gone     no answer within :meth:`RoundTimes.answer_s`, or it says   given up, if nothing came meanwhile
            that it is not in the round
is not      its stream is not open within ``TWO_DIALS_S``; if          given up
connected   hurried, within ten round trips (0.25 to 2 s)
is too      half of the round is over (and ``TWO_ANSWERS_S``), and at  given up: there is time to go on without it
slow        its pace it would not send all its values by the end
is overdue  65% of the round is over, a reducer sent no means for      given up, whatever it says
            ``FOUR_ANSWERS_S``, and another one has sent all
is last     it is hurried, and for ``TWO_ANSWERS_S`` (``MOMENT_S`` if  given up
            it was often at fault) nobody else owed what it owes
==========  =========================================================  =================================================

A partner that answers is waited for until one of the last three rows applies: on a slow line it may be silent for long.
Its pace counts only the time in which the reducer waited for it. A *hurried* member is one for which nobody waits long
(:meth:`manyhands.averaging.roster.Roster.hurried`).

A member without a vote is waited for until it has not asked for ``ANSWER_S`` how the round goes on, or its last control
connection ends: at once if it is killed, after 8.5 s if it is frozen or off the network. Once only members have not
voted that, as voters say, sent nothing, they have ``ANSWER_S``. So one that votes at once, and says that of all others,
does not have them left out.

The limits of whole phases are methods of :class:`RoundTimes`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from manyhands.averaging.allreduce.butterfly import Wanted
from manyhands.averaging.messages import Group
from manyhands.averaging.timing import (
    ANSWER_S,
    FOUR_ANSWERS_S,
    LATE_ANSWER_S,
    LOOK_S,
    MOMENT_S,
    SLOW_ANSWER_S,
    TWO_ANSWERS_S,
    TWO_DIALS_S,
)

PACE_KNOWN_SHARE = 0.5
"""After this share of a round's time the pace of a member that owes values is known."""
OVERDUE_SHARE = 0.65
"""After this share of a round's time, all reducers have gone on without the members that were too slow."""
MARGIN = 1.5
"""A reducer may take up to this many times as long as another one, and longer in proportion if its span is
larger."""
ROUND_TRIPS = 10
"""A hurried member has the time of this many round trips for its stream: half of it for a dial, which takes three, and
half to be asked to dial back, which takes five."""
QUEUED_BYTES = 16 * 1024
"""Bytes of values and means that may wait on the line before an answer."""


@dataclass(frozen=True)
class RoundTimes:
    """The limits of one member's round. All instants are loop times.

    Attributes:
        rank: rank of this member.
        deadline: when the time for the exchanges and votes is over. It counts from when the group has formed, so it is
            the same instant for all members.
        hurried: by rank of each member for which nobody waits long, for how many seconds it may hold up the others; see
            :meth:`~manyhands.averaging.matchmaking.matchmaker.Matchmaker.hurried`.
    """

    group: Group
    rank: int
    deadline: float
    hurried: Mapping[int, float] = field(default_factory=dict)

    # of an exchange

    def left_s(self, now: float) -> float:
        """Limit of an exchange, and of the leader's wait for the votes after it."""
        return max(self.deadline - now, MOMENT_S)

    def stream_s(self, rank: int, rtt_s: float) -> float:
        """Limit for the stream to a partner to open, from the beginning of the exchange."""
        if rank not in self.hurried:
            return TWO_DIALS_S
        return min(max(ROUND_TRIPS * rtt_s, LOOK_S), ANSWER_S)

    def late_s(self, now: float) -> float:
        """Limit for sent bytes to arrive, and for this member to finish after the others have committed."""
        return max(self.deadline - now, TWO_DIALS_S)

    def was_moving(self, last_received: float, now: float) -> bool:
        """Whether values still came at the end of an exchange."""
        return now - last_received < ANSWER_S

    # of calls

    def answer_s(self, rank: int, bytes_per_s: float = 0.0) -> float:
        """Limit of a member's answer, by the lowest known rate: ``bytes_per_s``, or the bandwidth of either side."""
        members = self.group.members
        rates = bytes_per_s, members[self.rank].bandwidth, members[rank].bandwidth
        slowest = min((rate for rate in rates if rate), default=math.inf)
        return min(max(ANSWER_S, QUEUED_BYTES / slowest), SLOW_ANSWER_S)

    def vote_s(self, now: float) -> float:
        """Limit of the call that brings a vote to the leader."""
        return self.left_s(now) + ANSWER_S

    def question_s(self, now: float) -> float:
        """Limit of the question to the leader how the round goes on, until the verdict that follows the last votes."""
        return self.left_s(now) + LATE_ANSWER_S

    @property
    def in_doubt_s(self) -> float:
        """Limit of the wait for the other members' answers, once the leader is lost."""
        return LATE_ANSWER_S


# partners in an exchange


def is_pace_known(passed_s: float, round_s: float) -> bool:
    """Whether so much of a round has passed that it shows how fast a line is."""
    return passed_s >= PACE_KNOWN_SHARE * round_s


@dataclass(frozen=True)
class Seen:
    """The stream of a partner at one look.

    Attributes:
        owed: what this member waits for; None if nothing is due, or this member has no room for it.
        received: bytes that came in this exchange.
        last_received: when the last of them came, or the stream was opened.
    """

    owed: Wanted | None
    received: int
    last_received: float


@dataclass(frozen=True)
class Ask:
    """Ask a partner whether it is in the round; :meth:`Stragglers.looked` takes the answer."""

    rank: int


@dataclass(frozen=True)
class GiveUp:
    """Go on without a partner."""

    rank: int
    reason: str


Action: TypeAlias = Ask | GiveUp


@dataclass
class _Partner:
    """The record of one partner, which lasts from look to look."""

    owed: Wanted | None = None
    owed_since: float = math.inf
    waited_s: float = 0.0  # seconds that this member waited for its values
    last_since: float | None = None  # since when nobody else owes what it owes
    asked_at: float = -math.inf
    asked_received: int | None = None  # bytes that had come when it was asked; None without a stream
    is_asked: bool = False  # it was asked, and has not answered yet


class Stragglers:
    """Judges the partners that one member still waits for in an exchange.

    Args:
        num_bytes: by rank of each partner, about how many bytes that one sends in all.
        span_bytes: by rank of each reducer, the size of its span.
        began: when the exchange began.
    """

    def __init__(
        self, times: RoundTimes, num_bytes: Mapping[int, int], span_bytes: Mapping[int, int], began: float
    ) -> None:
        self._times = times
        self._num_bytes = num_bytes
        self._span_bytes = span_bytes
        self._began = self._looked_at = began
        self._round_s = times.deadline - began
        self._partners = {rank: _Partner() for rank in num_bytes}

    def looked(
        self,
        seen: Mapping[int, Seen],
        answers: Mapping[int, str],
        over: Collection[int],
        awaited: Collection[int],
        has_reduced: bool,
        now: float,
    ) -> list[Action]:
        """Judge all partners; call it every ``LOOK_S``.

        Args:
            seen: the partners whose streams are open.
            answers: for partners that were asked: why the partner is gone, or empty if it is in the round.
            over: partners with which all was exchanged, or that are lost.
            awaited: partners that must open their stream, and can be asked about it.
            has_reduced: whether this member has averaged its own span.
        """
        passed_s, self._looked_at = now - self._looked_at, now
        actions: list[Action] = []
        for rank, partner in self._partners.items():
            if rank in over:
                continue
            one = seen.get(rank)
            if rank in answers:
                partner.is_asked = False
                received = one.received if one is not None else None
                if answers[rank] and received == partner.asked_received:
                    actions.append(GiveUp(rank, self._gone(rank, answers[rank])))
                    continue
            if one is None:
                if rank in awaited and not partner.is_asked and now - partner.asked_at >= ANSWER_S:
                    actions.append(self._ask(rank, None, now))
                continue
            if one.owed is not partner.owed:
                partner.owed, partner.owed_since = one.owed, now
            if one.owed is Wanted.VALUES:
                partner.waited_s += passed_s
            if one.owed is None:
                continue
            silent_s = now - max(one.last_received, partner.owed_since)
            if how := self._fault(rank, seen, over, silent_s, has_reduced, now):
                actions.append(GiveUp(rank, f"{self._name(rank)} {how}"))
            elif silent_s >= ANSWER_S and not partner.is_asked and now - partner.asked_at >= ANSWER_S:
                actions.append(self._ask(rank, one.received, now))
        return actions

    def _gone(self, rank: int, how: str) -> str:
        if self._partners[rank].asked_received is None:
            return f"no stream to a member: {self._name(rank)} {how}"
        return f"{self._name(rank)} sends nothing, and {how}"

    def _ask(self, rank: int, received: int | None, now: float) -> Ask:
        partner = self._partners[rank]
        partner.is_asked = True
        partner.asked_at = now
        partner.asked_received = received
        return Ask(rank)

    def _fault(
        self, rank: int, seen: Mapping[int, Seen], over: Collection[int], silent_s: float, has_reduced: bool, now: float
    ) -> str:
        """Why a partner that owes something is given up; empty if it is not."""
        if self._is_last(rank, seen, over, now):
            return "holds up the others, after there was trouble"
        if seen[rank].owed is Wanted.VALUES:
            how = self._too_slow(rank, seen[rank].received, now)
            return f"is too slow for the time that this round has: {how}" if how else ""
        if silent_s >= FOUR_ANSWERS_S and self._is_overdue(rank, seen, has_reduced, now):
            return f"answers, but sent no means for {silent_s:.0f} s"
        return ""

    def _is_last(self, rank: int, seen: Mapping[int, Seen], over: Collection[int], now: float) -> bool:
        """Whether a hurried partner has held up the others for some time."""
        hurried, partner = self._times.hurried, self._partners[rank]
        if rank not in hurried:
            return False
        others = self._partners.keys() - over - hurried.keys()
        if any(other not in seen or seen[other].owed is seen[rank].owed for other in others):
            partner.last_since = None
            return False
        if partner.last_since is None:
            partner.last_since = now
        return now - partner.last_since >= hurried[rank]

    def _too_slow(self, rank: int, received: int, now: float) -> str:
        """How a partner is too slow to send its values in time; empty if it is not, or its pace is not known yet."""
        passed_s = now - self._began
        waited_s = self._partners[rank].waited_s
        is_known = is_pace_known(passed_s, self._round_s) and passed_s >= TWO_ANSWERS_S
        if not is_known or waited_s < passed_s / 2:
            return ""
        if received == 0:
            return "it has sent nothing"
        needed_s = passed_s + (self._num_bytes[rank] - received) * waited_s / received
        return f"at its pace it would need {needed_s:.0f} s" if needed_s > self._round_s else ""

    def _is_overdue(self, rank: int, seen: Mapping[int, Seen], has_reduced: bool, now: float) -> bool:
        """Whether a reducer must have had all values for some time: another one has sent all its means.

        This peer's own span shows that only if these two alone reduce: other reducers may wait for this peer's values.
        """
        passed_s = now - self._began
        if passed_s < OVERDUE_SHARE * self._round_s:
            return False
        reducers = self._span_bytes.keys() - {rank}
        others = {other: one for other, one in seen.items() if other != rank}
        if reducers == {self._times.rank}:
            done_at = max([self._began, *(one.last_received for one in others.values())])
            return has_reduced and passed_s > MARGIN * (done_at - self._began)
        return any(
            passed_s > MARGIN * (one.last_received - self._began) * max(1.0, self._larger(rank, other))
            for other, one in others.items()
            if other in reducers and one.received >= self._num_bytes[other]
        )

    def _larger(self, rank: int, other: int) -> float:
        """The size of a reducer's span divided by that of another one."""
        return self._span_bytes[rank] / self._span_bytes[other]

    def _name(self, rank: int) -> str:
        return f"peer {self._times.group.members[rank].peer_id}"
