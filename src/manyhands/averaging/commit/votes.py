"""How a round is decided: the coordinator's count and the member's promises (docs/explanation/rounds.md). Pure.

A round has *ballots*, numbered ``term * STAGES + stage``. The members of a ballot hold something, say so to its
coordinator, and the coordinator does one of these, once for each ballot:

======================================================  ===========================================================
votes of the ballot                                     decision
======================================================  ===========================================================
more than half of the group hold the same result,       commit that
nobody lacks anything, and nobody was lost
all who are there have voted, somebody lacks a span     order: those who hear each other reduce it again, and vote in
                                                        the next ballot
more than half of the group can never hold one          abort; in doubt if an earlier coordinator may have committed
result any more
else                                                    none yet
======================================================  ===========================================================

The coordinator of term 0 is the group's leader; when it is lost, the next member by rank that is not a client begins
term 1, and so on. The first ballot of a later term decides nothing: who votes in it says what it has voted for last,
and promises not to vote in an earlier one. If more than half have promised, and among their votes in the latest ballot
there is a result that may have had more than half, or was adopted already, exactly this is *adopted*: all vote for it
again. So whatever two coordinators commit is the same. Source: Lamport, Paxos Made Simple, 2001 (ballots, promises),
and Fast Paxos, 2006 (members vote for what they hold, not for what they were told).

Nobody is blamed for the words of one other alone, where both can be wrong: see :func:`dropped`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from manyhands.averaging.messages import (
    MAX_REASON_LENGTH,
    Accusation,
    Group,
    Order,
    RoundManifest,
    SpanResult,
    Verdict,
    Vote,
)
from manyhands.base.identity import PeerId

STAGES = 8
"""Ballots of one coordinator."""
SHOWN_REASONS = 3
DIFFERENT = "the members hold different results"


def coordinators(group: Group) -> list[int]:
    """Ranks of those who may count votes, by term: the leader, then the others that can be dialled."""
    leader = group.rank_of(group.leader)
    assert leader is not None
    return [leader, *(rank for rank, member in enumerate(group.members) if rank != leader and not member.is_client)]


def dropped(accusations: Iterable[tuple[int, Accusation]], coordinator: int) -> dict[int, str]:
    """Who must go, by rank, with the reason, so that nobody is left who accuses somebody that is left.

    Who is in most of the quarrels goes first; of two, the one that sent what it must not, then the one that sent
    nothing, then not the coordinator, then the higher rank. One that accuses itself goes.
    """
    pairs = {(accuser, said.accused): said for accuser, said in accusations}
    gone: dict[int, str] = {}
    while pairs:
        score: Counter[int] = Counter()
        violations: Counter[int] = Counter()
        stalls: Counter[int] = Counter()
        for (accuser, accused), said in pairs.items():
            for rank in {accuser, accused}:
                score[rank] += len(pairs) + 1 if accuser == accused else 1
            violations[accused] += said.is_violation
            stalls[accused] += said.is_stalled
        worst = max(score, key=lambda rank: (score[rank], violations[rank], stalls[rank], rank != coordinator, rank))
        against = [said for (_, accused), said in pairs.items() if accused == worst]
        most = max(against, key=lambda said: (said.is_violation, said.is_stalled), default=None)
        gone[worst] = most.reason if most is not None else "it does not reach the others"
        pairs = {pair: said for pair, said in pairs.items() if worst not in pair}
    return gone


class VoteCount:
    """A coordinator's count of one term.

    Attributes:
        ballot: whose votes count now.
        order: that led to it, if one did.
        votes: of this ballot, by rank; the first of a member counts.
        lost: who cannot vote any more, by rank, with the reason.
        faults: what has been found wrong with whom.
        verdict: once it is decided.
    """

    def __init__(self, group: Group, term: int = 0) -> None:
        self.group = group
        self.term = term
        self.ballot = term * STAGES
        self.order: Order | None = None
        self.votes: dict[int, Vote] = {}
        self.lost: dict[int, str] = {}
        self.faults: dict[int, str] = {}
        self.verdict: Verdict | None = None
        self._coordinator = coordinators(group)[term]
        self._members = set(range(len(group.members)))
        self._is_closed = False

    def add(self, rank: int, vote: Vote) -> None:
        """VoteCount the vote of a member; those of others and of other ballots are ignored."""
        if rank in self._members and vote.ballot == self.ballot:
            self.lost.pop(rank, None)
            vote.accusations = [said for said in vote.accusations if said.accused < len(self.group.members)]
            self.votes.setdefault(rank, vote)

    def lose(self, rank: int, reason: str) -> None:
        """A member does not answer any more; what it has voted stays."""
        self.lost.setdefault(rank, reason)

    def close(self) -> None:
        """The time is over: order nothing more."""
        self._is_closed = True

    def has_majority(self) -> bool:
        """Whether more than half of the group have voted in this ballot."""
        return self._is_majority(len(self.votes))

    def suspects(self) -> set[int]:
        """Members of whom others say that they are lost, and that have not voted."""
        return {said.accused for vote in self.votes.values() for said in vote.accusations} & self.missing()

    def missing(self) -> set[int]:
        """Members that may still vote in this ballot."""
        return self._live() - self.votes.keys()

    def only_stalled(self) -> set[int]:
        """Members that others got nothing from, if these are the only ones that have not voted."""
        stalled = {said.accused for vote in self.votes.values() for said in vote.accusations if said.is_stalled}
        return self.missing() if self.missing() <= stalled else set()

    def decide(self) -> Verdict | Order | None:
        """What follows from the votes, or None while more are needed; after an order the next ballot has begun."""
        if self.verdict is not None:
            return self.verdict
        decision = self._read() if self._is_reading() else self._count()
        if isinstance(decision, Order):
            for said in (said for vote in self.votes.values() for said in vote.accusations):
                if said.accused in self.lost and (said.is_stalled or said.is_violation):
                    self.faults.setdefault(said.accused, said.reason)
            self.ballot, self.order, self.votes = decision.ballot, decision, {}
            self._members = set(decision.members)
        elif decision is not None:
            self.verdict = decision
        return decision

    # the two kinds of ballots

    def _is_reading(self) -> bool:
        return self.term > 0 and self.order is None

    def _count(self) -> Verdict | Order | None:
        by_result, most = self._by_result()
        is_won = self._is_majority(len(most))
        num_open = len(self.missing())
        if is_won and len(most) == len(self.votes) and not (self.lost and num_open):  # they may lack what was lost
            return self._commit(most)
        if not is_won and not self._is_majority(len(most) + num_open) and not self._is_majority(len(self._live())):
            return self._abort()
        if num_open:
            return None
        here = self._who_hear_each_other()
        if is_won and (here <= set(most) or not self._can_average(here)):
            return self._commit(most)
        if not self._can_average(here) or (self.order is not None and self.order.adopted is not None):
            return self._commit(most) if is_won else self._abort()
        if sum(not here.isdisjoint(ranks) for ranks in by_result.values()) > 1:
            return self._commit(most) if is_won else self._abort(DIFFERENT)
        return self._again(here) or (self._commit(most) if is_won else self._abort())

    def _read(self) -> Verdict | Order | None:
        if not self.has_majority():
            return None if self._is_majority(len(self.votes) + len(self.missing())) else self._abort()
        if self.missing():
            return None
        latest = max(vote.accepted for vote in self.votes.values())
        by_result, most = self._by_result(latest)
        num_unknown = len(self.group.members) - len(self.votes)
        bound = any(vote.is_bound() for vote in self.votes.values() if vote.accepted == latest)
        possible = [ranks for ranks in by_result.values() if bound or self._is_majority(len(ranks) + num_unknown)]
        here = self._who_hear_each_other()
        if len(possible) > 1:
            return self._abort()
        if possible:
            return self._adopt(possible[0])
        if most and here <= set(most):
            return self._adopt(most)
        return (self._again(here) if self._can_average(here) else None) or self._abort()

    def _adopt(self, ranks: Sequence[int]) -> Order:
        vote = self.votes[ranks[0]]
        return Order(self.ballot + 1, sorted(self.votes), adopted=self.group.manifest(vote.digest, vote.parts))

    def _again(self, here: set[int]) -> Order | None:
        """Have a span reduced again: what somebody lacks; all if they did not go the same way so far."""
        votes = [self.votes[rank] for rank in here]
        numel = Counter(vote.numel for vote in votes).most_common(1)[0][0]
        gaps = [vote.missing for vote in votes if vote.missing[0] < vote.missing[1] <= numel]
        start, stop = min((gap[0] for gap in gaps), default=0), max((gap[1] for gap in gaps), default=0)
        if len({vote.computed for vote in votes}) > 1:
            start, stop = 0, numel
        if start >= stop or (self.ballot + 1) % STAGES == 0 or self._is_closed:
            return None
        return Order(self.ballot + 1, sorted(here), start, stop)

    # what the votes say

    def _by_result(self, accepted: int | None = None) -> tuple[Mapping[bytes, list[int]], list[int]]:
        """Ranks by what they hold, and those of the most frequent result."""
        by_result: dict[bytes, list[int]] = defaultdict(list)
        for rank, vote in sorted(self.votes.items()):
            if vote.digest and accepted in (None, vote.accepted):
                by_result[vote.digest + msgspec.msgpack.encode(vote.parts)].append(rank)
        return by_result, max(by_result.values(), key=len, default=[])

    def _live(self) -> set[int]:
        return self._members - self.lost.keys()

    def _who_hear_each_other(self) -> set[int]:
        here = self._live() & self.votes.keys()
        said = [(rank, one) for rank in here for one in self.votes[rank].accusations if one.accused in here]
        gone = dropped(said, self._coordinator) | self._misfits(here)
        self.faults |= gone
        return here - gone.keys()

    def _misfits(self, here: set[int]) -> dict[int, str]:
        """Whose vector is not as long as that of most, by rank, with the reason."""
        numels = {rank: self.votes[rank].numel for rank in sorted(here)}
        usual = max(Counter(numels.values()).items(), key=lambda pair: pair[1], default=(0, 0))[0]
        return {
            rank: f"the vector of peer {self.group.members[rank].peer_id} has {numel} values, not {usual}"
            for rank, numel in numels.items()
            if numel != usual
        }

    def _can_average(self, here: set[int]) -> bool:
        members = [self.group.members[rank] for rank in here]
        can_reduce = any(not member.is_client for member in members)
        return self._is_majority(len(here)) and can_reduce and any(member.weight > 0 for member in members)

    def _is_majority(self, num_members: int) -> bool:
        return 2 * num_members > len(self.group.members)

    # decisions

    def _commit(self, ranks: Sequence[int]) -> Verdict:
        vote = self.votes[ranks[0]]
        for said in (said for other in self.votes.values() for said in other.accusations):
            if said.accused not in self.votes or said.is_violation:
                self.faults.setdefault(said.accused, said.reason)
        return Verdict(True, self.group.manifest(vote.digest, vote.parts), self._reason([]), self._blamed())

    def _abort(self, why: str = "") -> Verdict:
        """Once a member may have heard of a commit by somebody else, nobody can say that there was none."""
        said = sorted({vote.reason for vote in self.votes.values() if vote.reason})
        is_known = self.term == 0
        return Verdict(is_known, None, why or self._reason(said) or DIFFERENT, self._blamed())

    def _reason(self, said: Sequence[str]) -> str:
        faults = {**self.lost, **self.faults}  # what a member did says more than that it is gone
        reasons = list(dict.fromkeys([*said, *(faults[rank] for rank in sorted(faults))]))
        return "; ".join(reasons[:SHOWN_REASONS])[: SHOWN_REASONS * MAX_REASON_LENGTH]

    def _blamed(self) -> list[PeerId]:
        return sorted(self.group.members[rank].peer_id for rank in {**self.lost, **self.faults})


@dataclass
class HeldResult:
    """A result: what was averaged, and who contributed."""

    digest: bytes
    parts: list[SpanResult] = field(default_factory=list)


class Voter:
    """A member's votes in one round.

    Attributes:
        term: whose coordinator it follows.
        ballot: in which it votes next.
        accepted: the ballot in which it last voted for a result; -1 if it never did.
        result: for which it did.
        computed: the ballot in which it last averaged.
        numel: of the vector.
    """

    def __init__(self, group: Group, rank: int, numel: int) -> None:
        self.group = group
        self.rank = rank
        self.numel = numel
        self.term = 0
        self.ballot = 0
        self.accepted = -1
        self.result: HeldResult | None = None
        self.computed = 0
        self._missing = (0, numel)
        self._reason = ""
        self._accusations: list[Accusation] = []

    def averaged(
        self,
        result: HeldResult | None,
        missing: tuple[int, int],
        reason: str = "",
        accusations: Sequence[Accusation] = (),
    ) -> None:
        """The averaging that this ballot asks for is over: there is a result, or there is something missing."""
        self.computed = self.ballot
        self._missing, self._reason, self._accusations = missing, reason, list(accusations)
        if result is not None:
            self.accepted, self.result = self.ballot, result

    def vote(self) -> Vote:
        """What to tell the coordinator of this ballot."""
        is_reading = self.term > 0 and self.ballot % STAGES == 0
        has_voted = self.result is not None and (is_reading or self.accepted == self.ballot)
        result = self.result if self.result is not None and has_voted else HeldResult(b"")
        return Vote(
            self.group.group_id,
            result.digest,
            self._reason,
            self.ballot,
            self.accepted if has_voted else -1,
            result.parts,
            self._missing,
            self._accusations,
            self.computed,
            self.numel,
        )

    def follow(self, order: Order) -> bool:
        """Whether to do what the coordinator of this term orders; an adopted result is voted for at once."""
        is_next = order.ballot > self.ballot and order.ballot // STAGES == self.term
        if not is_next or self.rank not in order.members or order.stop > self.numel:
            return False
        self.ballot = order.ballot
        if order.adopted is not None:
            self.accepted, self.result = order.ballot, held_of(order.adopted)
        return True

    def next_coordinator(self) -> int | None:
        """The coordinator is lost: promise the next one, and return its rank; None if nobody is left."""
        ranks = coordinators(self.group)
        if self.term + 1 >= len(ranks):
            return None
        self.term += 1
        self.ballot = self.term * STAGES
        return ranks[self.term]


def held_of(manifest: RoundManifest) -> HeldResult:
    """The result that a manifest commits."""
    return HeldResult(manifest.digest, manifest.parts)
