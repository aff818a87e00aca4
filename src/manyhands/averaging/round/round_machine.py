"""One member's part in a round, from the formed group to the verdict, as a state machine. Pure.

:mod:`.times` says how long a member waits for whom.

A round is one or more *exchanges*: an all-reduce of the whole vector (:mod:`manyhands.averaging.allreduce.butterfly`),
after which each member votes on what it holds. Each member asks the leader once how the round goes on, and the leader
answers as soon as it has news for that member. Events come in with :meth:`Round.on`, actions come out:

===================  =============================================  ==========  ========================================
state                event                                          next        actions
===================  =============================================  ==========  ========================================
exchanging           this member's own exchange is over             voted       vote; the leader counts its own vote
exchanging, voted    told: again, with this member                  exchanging  exchange again
exchanging, voted,   told: committed, or aborted                    over        finish; a member that lacks the means
in doubt                                                                        asks members other than the leader for
                                                                                them (``StepRounds._lacking_means``)
exchanging, voted    told: members are lost                         the same    do not wait for their streams
voted                the leader says nothing for ``ANSWER_S``       voted       ask it whether it is in the round
exchanging, voted    the leader is lost, breaks the protocol, or    in doubt    stop; ask all others how it ended
                     gives no verdict in time
in doubt             none of them knows it, or the time is over     over        abort, for this member alone
===================  =============================================  ==========  ========================================

The leader of the group is a member like the others, and also counts the votes (:mod:`.count`):

===================  =============================================  ==========  ========================================
the leader, until    a vote, or a member is lost                    by count    decide; tell those that ask
it has decided       others have voted: a member that has not, and  the same    ask it whether it is in the round
                     of which others complain, or which says
                     nothing for ``ANSWER_S``
                     only members that sent nothing have not voted  by count    they are lost after ``ANSWER_S``
                     its time for the others' votes is over, or     by count    decide by the votes that are there
                     this peer ends its round early
                     this process stood still for                   by count    the same: the others may have left
                     ``TWO_ANSWERS_S``
===================  =============================================  ==========  ========================================

The driver (:class:`.driver.RoundDriver`) raises the events:

====================  ================================================================================================
event                 raised by
====================  ================================================================================================
:class:`Exchanged`    the end of this member's :class:`.exchange.Exchange`
:class:`Voted`        a ``VOTE`` call of another member, to the leader
:class:`Told`         the answer to an ``ASK_VERDICT`` call: to the leader, or in doubt to any other member
:class:`Lost`         to the leader: a broken connection; to any member: an ``ASK_IN_ROUND`` call that failed or whose
                      answer is no, or calls to the leader that failed
:class:`NobodyKnows`  the end of the ``ASK_VERDICT`` calls of a member in doubt, or of the time for them
:class:`TimeOver`     a timer, which starts at the end of this member's exchange
:class:`GaveUp`       ``RoundDriver.run``, when it is cancelled or fails; ``Answers.close``, when this peer leaves;
                      :meth:`Round.on` itself, for a leader whose process stood still
:class:`Looked`       a timer, every ``LOOK_S``
====================  ================================================================================================

Only the leader decides. A member that aborts in doubt while others committed is behind: the lineage in the progress
records shows this, and the member follows the others. It never passes on what it assumed in doubt.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from manyhands.averaging.messages import Again, Group, SpanResult, Verdict, VerdictQuery, Vote
from manyhands.averaging.round.count import MAX_EXCHANGES, Count, includes_values
from manyhands.averaging.round.times import VoteTimes, has_left
from manyhands.rpc.frames import readable


class State(enum.Enum):
    """The states of one member's round."""

    EXCHANGING = "exchanging"
    VOTED = "voted"
    IN_DOUBT = "in doubt"
    OVER = "over"


# events


@dataclass(frozen=True)
class Exchanged:
    """This member's own exchange is over."""

    vote: Vote


@dataclass(frozen=True)
class Voted:
    """To the leader: another member has voted."""

    rank: int
    vote: Vote


@dataclass(frozen=True)
class Lost:
    """A member can no longer be reached, or is in another round."""

    rank: int
    reason: str


@dataclass(frozen=True)
class Told:
    """Another member says how the round goes on: the leader, or in doubt any other."""

    rank: int
    verdict: Verdict


@dataclass(frozen=True)
class NobodyKnows:
    """In doubt: all others were asked in vain, or the time for their answers is over."""


@dataclass(frozen=True)
class TimeOver:
    """This member has waited as long as it may since it voted."""

    reason: str


@dataclass(frozen=True)
class GaveUp:
    """This peer ends its round early."""

    reason: str


@dataclass(frozen=True)
class Looked:
    """A little time has passed; comes several times a second."""


Event: TypeAlias = Exchanged | Voted | Lost | Told | NobodyKnows | TimeOver | GaveUp | Looked


# actions


@dataclass(frozen=True)
class BeginExchange:
    """Average the values of these members, after ending an exchange that still goes on."""

    number: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class StopExchange:
    """The round goes on without this member's values."""


@dataclass(frozen=True)
class SendVote:
    """Send this member's vote to the leader."""

    vote: Vote


@dataclass(frozen=True)
class Ask:
    """Ask a member whether it is in the round; :class:`Lost` follows if it is not."""

    rank: int


@dataclass(frozen=True)
class AskOthers:
    """Ask all members but the leader how the round ended."""


@dataclass(frozen=True)
class Forget:
    """Do not wait for the streams of members that are lost."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    """The round is over for this member."""

    verdict: Verdict


Action: TypeAlias = BeginExchange | StopExchange | SendVote | Ask | AskOthers | Forget | Finish


class Round:
    """One member's view of a round.

    Args:
        hurried: ranks of members for which nobody waits long.
        voters: ranks whose votes count; by default all.

    Attributes:
        exchange: the number of the exchange that this member is in.
        members: ranks that take part in it.
        voters: ranks whose votes count.
        count: the count of the votes, if this member leads; else None.
        verdict: the leader's decision, for others that ask; None as long as this member does not know it.
        lost: ranks of the members that, as the leader has said, are lost.
        times: of this exchange.
    """

    def __init__(
        self, group: Group, rank: int, hurried: Collection[int] = (), voters: Collection[int] | None = None
    ) -> None:
        leader = group.rank_of(group.leader)
        assert leader is not None
        self.group = group
        self.rank = rank
        self.leader = leader
        self.state = State.EXCHANGING
        self.exchange = 0
        self.members = frozenset(range(len(group.members)))
        self.voters = self.members if voters is None else frozenset(voters)
        self.count = Count(group, self.voters) if rank == leader else None
        self.verdict: Verdict | None = None
        self.lost: tuple[int, ...] = ()
        self._hurried = frozenset(hurried)
        self._reason = ""  # why this member lacks the result
        self._vote: Vote | None = None  # on the exchange that this member is in
        self._last_event_at = math.inf
        self.times = VoteTimes()

    @property
    def has_lost(self) -> bool:
        """Whether a member is known to be lost."""
        return bool(self.count.lost if self.count is not None else self.lost)

    def begin(self) -> list[Action]:
        """The first exchange, of all members."""
        return [BeginExchange(0, tuple(range(len(self.group.members))))]

    def on(self, event: Event, now: float) -> list[Action]:
        """Take an event in; returns what to do.

        Args:
            now: seconds, of any clock that does not go back.
        """
        if self.state is State.OVER:
            return []
        stood_still_s = now - self._last_event_at
        self._last_event_at = now
        if self.count is not None and has_left(stood_still_s):
            event = GaveUp(f"its process stood still for {stood_still_s:.0f} s")
        match event:
            case Exchanged(vote):
                return self._exchanged(vote, now)
            case Told(rank, verdict):
                return self._told(rank, verdict)
            case Looked():
                return self._looked(now)
            case NobodyKnows():
                return self._abort_alone() if self.state is State.IN_DOUBT else []
            case Lost(rank, reason) if self.count is None:
                return self._doubt(reason) if rank == self.leader else []
            case TimeOver(reason) if self.count is None:
                return self._doubt(reason)
            case GaveUp() if self.count is None:
                return []  # the others notice that it is gone
            case _:
                return self._counted(event, now)

    def answer(self, rank: int, query: VerdictQuery) -> Verdict | None:
        """The answer to a member that asks how the round goes on; None while there is no news for it."""
        if self.verdict is not None:
            return self.verdict
        if self.count is None:
            in_doubt = Verdict(False, blamed=[self.group.leader])
            return in_doubt if self.state is State.IN_DOUBT else None
        again, lost = self.count.again, self.count.lost
        if again is not None and query.exchange < again.exchange and rank in again.members:
            return Verdict(False, again=again)
        if len(lost) > query.num_lost:
            return Verdict(False, blamed=[self.group.members[other].peer_id for other in lost])
        return None

    # a member

    def _exchanged(self, vote: Vote, now: float) -> list[Action]:
        if self.state is not State.EXCHANGING or vote.exchange != self.exchange:
            return []
        self.state = State.VOTED
        self._reason = vote.reason
        self._vote = vote
        if self.count is not None:
            return self._counted(Voted(self.rank, vote), now)
        self.times.begin(now)
        return [SendVote(vote)]

    def _told(self, rank: int, verdict: Verdict) -> list[Action]:
        if self.count is not None:
            return []  # the leader alone decides
        if flaw := self._flaw(verdict):
            return self._doubt(flaw) if rank == self.leader else []
        verdict.reason = readable(verdict.reason)
        verdict.blamed = [peer_id for peer_id in verdict.blamed if self.group.rank_of(peer_id) is not None]
        if verdict.is_known:
            return self._finish(verdict)
        if rank != self.leader or self.state is State.IN_DOUBT:
            return []
        if verdict.again is not None:
            return self._exchange_again(verdict.again)
        ranks = {self.group.rank_of(peer_id) for peer_id in verdict.blamed} - {None, *self.lost}
        new = tuple(sorted(other for other in ranks if other is not None))
        self.lost += new
        return [Forget(new)] if new else []

    def _flaw(self, verdict: Verdict) -> str:
        """Why a leader that keeps to the rules cannot have decided this; empty if it can."""
        manifest, again = verdict.manifest, verdict.again
        if manifest is not None:
            parts, vote = manifest.parts, self._vote
            members = frozenset(range(len(self.group.members))) - manifest.left_out
            is_of_group = manifest == self.group.manifest(manifest.digest, parts, members)
            if not (verdict.is_known and is_of_group and _are_whole(self.group, parts)):
                return "a verdict that is not about the group it was asked about"
            if vote and manifest.digest == vote.digest and (parts, members) != (vote.parts, self.members):
                return "a verdict that names other contributors than this member has heard"
        if again is None:
            return ""
        ranks, number = again.members, again.exchange
        is_next = self.state is State.VOTED and number == self.exchange + 1 < MAX_EXCHANGES
        num_members = len(self.group.members)
        is_sound = ranks == sorted(set(ranks)) and all(other < num_members for other in ranks)
        is_sound = is_sound and 2 * len(self.voters.intersection(ranks)) > len(self.voters)  # fewer could not commit
        if verdict.is_known or not (is_next and is_sound and self.rank in ranks and includes_values(self.group, ranks)):
            return "an order that this member cannot follow"
        return ""

    def _doubt(self, reason: str) -> list[Action]:
        if self.state is State.IN_DOUBT:
            return []
        self.state = State.IN_DOUBT
        said = f"{self._reason}; " if self._reason else ""
        self._reason = f"{said}the leader was lost ({reason})"
        return [StopExchange(), AskOthers()]

    def _abort_alone(self) -> list[Action]:
        self.state = State.OVER
        reason = f"no remaining member knows the verdict: {self._reason}"
        return [Finish(Verdict(True, None, reason, [self.group.leader]))]

    def _exchange_again(self, again: Again) -> list[Action]:
        self.exchange = again.exchange
        self.members = frozenset(again.members)
        self._reason = ""
        self.times = VoteTimes()
        if self.rank not in again.members:  # only the leader can be here: it goes on counting
            self.state = State.VOTED
            return [StopExchange()]
        self.state = State.EXCHANGING
        return [BeginExchange(again.exchange, tuple(again.members))]

    def _finish(self, verdict: Verdict) -> list[Action]:
        self.state, self.verdict = State.OVER, verdict
        return [Finish(verdict)]

    # the leader

    def _counted(self, event: Event, now: float) -> list[Action]:
        count = self.count
        assert count is not None
        match event:
            case Voted(rank, vote) if vote.exchange > count.exchange:
                count.lose(rank, f"{self.group.members[rank].peer_id} voted in an exchange that has not begun")
            case Voted(rank, vote):
                vote.reason = readable(vote.reason)
                vote.complaints = [
                    msgspec.structs.replace(said, reason=readable(said.reason)) for said in vote.complaints
                ]
                count.add(rank, vote)
                self.times.begin(now)
            case Lost(rank, reason):
                count.lose(rank, reason)
            case TimeOver(reason):
                count.close(reason)
            case GaveUp(reason):
                count.give_up(reason)
        return self._decide()

    def _decide(self) -> list[Action]:
        assert self.count is not None
        decision = self.count.decide()
        if isinstance(decision, Verdict):
            return self._finish(decision)
        return self._exchange_again(decision) if decision is not None else []

    # both

    def _looked(self, now: float) -> list[Action]:
        """Ask the members that are waited for whether they are still there; the leader gives up those that stall."""
        if self.count is None:
            return self._ask([self.leader], (), now) if self.state is State.VOTED else []
        if not self.count.votes:
            return []
        stalled = self.count.only_stalled()
        given_up = stalled if self.times.have_stalled(stalled, now) else stalled & self._hurried
        for rank in given_up:  # this leader may be one of them
            self.count.lose(rank, f"{self.group.members[rank].peer_id} answers, but does not vote")
        if given_up:
            return self._decide()
        return self._ask(self.count.missing() - {self.rank}, self.count.suspects(), now)

    def _ask(self, waited_for: Collection[int], suspects: Collection[int], now: float) -> list[Action]:
        return [Ask(rank) for rank in self.times.to_ask(waited_for, suspects, now)]


def _are_whole(group: Group, parts: Sequence[SpanResult]) -> bool:
    """Whether parts lie end to end, and name only members."""
    num_members, at = len(group.members), 0
    for part in parts:
        ranks = [part.reducer, *part.absent]
        if part.start != at or part.stop <= at or max(ranks) >= num_members or part.absent != sorted(set(part.absent)):
            return False
        at = part.stop
    return True
