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
in doubt                                                                        may get them from others
exchanging, voted    the leader is lost, breaks the protocol, or    in doubt    stop; ask all others how it ended
                     gives no verdict in time
in doubt             none of them knows it, or the time is over     over        abort, for this member alone
===================  =============================================  ==========  ========================================

The leader of the group is a member like the others, and also counts the votes (:mod:`.count`):

===================  =============================================  ==========  ========================================
the leader, until    a vote, or a member is lost                    by count    decide; tell those that ask
it has decided       only members have not voted that, as voters    the same    give them ``ANSWER_S``, then they are
                     say, sent nothing                                          lost
                     its time for the others' votes is over         by count    decide by the votes that are there
                     this peer ends its round early                 over        abort, for all: with more than half of
                                                                                the votes it would have committed
===================  =============================================  ==========  ========================================

The driver (:class:`.driver.RoundDriver`) raises the events:

====================  ================================================================================================
event                 raised by
====================  ================================================================================================
:class:`Exchanged`    the end of this member's :class:`.exchange.Exchange`
:class:`Voted`        a ``VOTE`` call of another member, to the leader
:class:`Told`         the answer to an ``ASK_VERDICT`` call: to the leader, or in doubt to any other member
:class:`Lost`         to the leader: the end of the last connection; no ``ASK_VERDICT`` call that is open, ``ANSWER_S``
                      after one was given up; or none at all, ``ANSWER_S`` after the leader's own first exchange. To
                      any other member: calls to the leader that failed, or had no answer in time
:class:`NobodyKnows`  the end of the ``ASK_VERDICT`` calls of a member in doubt, or of the time for them
:class:`TimeOver`     a timer, which starts at the end of the leader's own exchange
:class:`LastAreLate`  a timer, ``ANSWER_S`` after :class:`AwaitLast`
:class:`GaveUp`       ``RoundDriver.run``, when it is cancelled or fails; ``Answers.close``, when this peer leaves
====================  ================================================================================================

Only the leader decides. A member that aborts in doubt while others committed is behind: the lineage in the progress
records shows this, and the member follows the others. It never passes on what it assumed in doubt.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from manyhands.averaging.messages import Again, Group, SpanResult, Verdict, VerdictQuery, Vote
from manyhands.averaging.round.count import MAX_EXCHANGES, Count, includes_values
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
    """To the leader: the time for the votes is over."""

    reason: str


@dataclass(frozen=True)
class LastAreLate:
    """To the leader: the members that it waited for last have had their time."""

    exchange: int


@dataclass(frozen=True)
class GaveUp:
    """This peer ends its round early."""

    reason: str


Event: TypeAlias = Exchanged | Voted | Lost | Told | NobodyKnows | TimeOver | LastAreLate | GaveUp


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
class AwaitLast:
    """Only members that sent the others nothing have not voted: :class:`LastAreLate` comes in a moment."""

    exchange: int


@dataclass(frozen=True)
class AskOthers:
    """Ask all members but the leader how the round ended."""


@dataclass(frozen=True)
class Finish:
    """The round is over for this member."""

    verdict: Verdict


Action: TypeAlias = BeginExchange | StopExchange | SendVote | AwaitLast | AskOthers | Finish


class Round:
    """One member's view of a round.

    Args:
        voters: ranks whose votes count; by default all.

    Attributes:
        exchange: the number of the exchange that this member is in.
        members: ranks that take part in it.
        voters: ranks whose votes count.
        count: the count of the votes, if this member leads; else None.
        verdict: the leader's decision, for others that ask; None as long as this member does not know it.
    """

    def __init__(self, group: Group, rank: int, voters: Collection[int] | None = None) -> None:
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
        self._reason = ""  # why this member lacks the result
        self._vote: Vote | None = None  # on the exchange that this member is in
        self._awaits_last_in = -1  # the exchange in which this leader waits for the last votes

    def begin(self) -> list[Action]:
        """The first exchange, of all members."""
        return [BeginExchange(0, tuple(range(len(self.group.members))))]

    def on(self, event: Event) -> list[Action]:
        """Take an event in; returns what to do."""
        if self.state is State.OVER:
            return []
        match event:
            case Exchanged(vote):
                return self._exchanged(vote)
            case Told(rank, verdict):
                return self._told(rank, verdict)
            case NobodyKnows():
                return self._abort_alone() if self.state is State.IN_DOUBT else []
            case Lost(rank, reason) if self.count is None:
                return self._doubt(reason) if rank == self.leader else []
            case GaveUp() if self.count is None:
                return []  # the others notice that it is gone
            case _:
                return self._counted(event)

    def answer(self, rank: int, query: VerdictQuery) -> Verdict | None:
        """The answer to a member that asks how the round goes on; None while there is no news for it."""
        if self.verdict is not None:
            return self.verdict
        if self.count is None:
            return Verdict(False) if self.state is State.IN_DOUBT else None
        again = self.count.again
        if again is not None and query.exchange < again.exchange and rank in again.members:
            return Verdict(False, again=again)
        return None

    # a member

    def _exchanged(self, vote: Vote) -> list[Action]:
        if self.state is not State.EXCHANGING or vote.exchange != self.exchange:
            return []
        self.state = State.VOTED
        self._reason = vote.reason
        self._vote = vote
        if self.count is not None:
            return self._counted(Voted(self.rank, vote))
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
        if rank != self.leader or verdict.again is None:
            return []
        return self._exchange_again(verdict.again)

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
            return "" if verdict.is_known else "an answer without news"
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
        if self.rank not in again.members:  # only the leader can be here: it goes on counting
            self.state = State.VOTED
            return [StopExchange()]
        self.state = State.EXCHANGING
        return [BeginExchange(again.exchange, tuple(again.members))]

    def _finish(self, verdict: Verdict) -> list[Action]:
        self.state, self.verdict = State.OVER, verdict
        return [Finish(verdict)]

    # the leader

    def _counted(self, event: Event) -> list[Action]:
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
            case Lost(rank, reason):
                count.lose(rank, reason)
            case LastAreLate(exchange) if exchange == count.exchange:
                for rank in count.only_stalled():  # this leader may be one of them
                    count.lose(rank, f"{self.group.members[rank].peer_id} answers, but does not vote")
            case TimeOver(reason):
                count.close(reason)
            case GaveUp(reason):
                count.give_up(reason)
        return self._decide()

    def _decide(self) -> list[Action]:
        assert self.count is not None
        decision = self.count.decide()
        if decision is None:
            if self._awaits_last_in == self.count.exchange or not self.count.only_stalled():
                return []
            self._awaits_last_in = self.count.exchange
            return [AwaitLast(self.count.exchange)]
        return self._finish(decision) if isinstance(decision, Verdict) else self._exchange_again(decision)


def _are_whole(group: Group, parts: Sequence[SpanResult]) -> bool:
    """Whether parts lie end to end, and name only members."""
    num_members, at = len(group.members), 0
    for part in parts:
        ranks = [part.reducer, *part.absent]
        if part.start != at or part.stop <= at or max(ranks) >= num_members or part.absent != sorted(set(part.absent)):
            return False
        at = part.stop
    return True
