"""How the leader of a group decides a round: votes go in, a verdict or an order comes out. Pure.

A round has *ballots*, numbered from 0. In each, every member averages a part of the vector (in ballot 0 all of it) and
votes. Only the leader counts votes, so only one peer can decide (docs/explanation/rounds.md), once for each ballot:

======================================================  ===========================================================
votes of the ballot                                     decision
======================================================  ===========================================================
more than half of the group hold the same result,       commit that result
no voter lacks anything, and no member was lost while
a vote is outstanding
all members that live have voted, and one of them       order: the members that hear each other reduce the lacking
lacks a part                                            part again, and vote in the next ballot
no result can be held by more than half any more,       abort
and no more than half live to reduce it again
anything else                                           none yet
======================================================  ===========================================================
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

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
from manyhands.base.errors import ProtocolViolation
from manyhands.rpc.frames import readable

MAX_BALLOTS = 8
"""A death costs one ballot, and few members die in one round: more ballots would not succeed either."""
SHOWN_REASONS = 3
"""More members in a reason would make a log line unreadable."""
DIFFERENT = "the members hold different results"


def dropped(accusations: Iterable[tuple[int, Accusation]], leader: int) -> dict[int, str]:
    """Choose the members to leave out, so that of each accuser and accused at most one stays; returns the reasons.

    The member with the most quarrels goes first. Of two, it is the one that sent something forbidden, then the one that
    sent nothing, then the one that does not lead, then the higher rank. A member that accuses itself goes.
    """
    pairs = {(accuser, said.accused): said for accuser, said in accusations}
    gone: dict[int, str] = {}
    while pairs:
        score, violations, stalls = Counter[int](), Counter[int](), Counter[int]()
        for (accuser, accused), said in pairs.items():
            for rank in {accuser, accused}:
                score[rank] += len(pairs) + 1 if accuser == accused else 1
            violations[accused] += said.is_violation
            stalls[accused] += said.is_stalled
        worst = max(score, key=lambda rank: (score[rank], violations[rank], stalls[rank], rank != leader, rank))
        against = [said for (_, accused), said in pairs.items() if accused == worst]
        most = max(against, key=lambda said: (said.is_violation, said.is_stalled), default=None)
        gone[worst] = most.reason if most is not None else "it does not reach the others"
        pairs = {pair: said for pair, said in pairs.items() if worst not in pair}
    return gone


class VoteCount:
    """The leader's count of the votes of one round.

    Attributes:
        order: that led to this ballot; None in the first one.
        votes: of this ballot, by rank; the first vote of a member counts.
        lost: members that cannot vote any more, by rank, with the reason.
        faults: what members did wrong, by rank.
    """

    def __init__(self, group: Group) -> None:
        leader = group.rank_of(group.leader)
        assert leader is not None
        self.group = group
        self.ballot = 0
        self.order: Order | None = None
        self.votes: dict[int, Vote] = {}
        self.lost: dict[int, str] = {}
        self.faults: dict[int, str] = {}
        self.verdict: Verdict | None = None
        self.leader = leader
        self._members = set(range(len(group.members)))
        self._is_closed = False

    def add(self, rank: int, vote: Vote) -> None:
        """Count a vote; votes in other ballots and of members that were left out are ignored."""
        if rank in self._members and vote.ballot == self.ballot:
            self.lost.pop(rank, None)
            vote.accusations = [said for said in vote.accusations if said.accused < len(self.group.members)]
            self.votes.setdefault(rank, vote)

    def lose(self, rank: int, reason: str) -> None:
        """Expect no further vote from a member; the vote that it has cast stays."""
        self.lost.setdefault(rank, reason)

    def close(self, reason: str) -> None:
        """The time is over: members without a vote are lost, and the next decision is the verdict."""
        self._is_closed = True
        for rank in self.missing():
            self.lose(rank, f"{self.group.members[rank].peer_id}: {reason}")

    def give_up(self, reason: str) -> None:
        """The leader ends its round early: the next decision is the verdict, and only the leader is lost."""
        self._is_closed = True
        self.lose(self.leader, f"{self.group.leader}: {reason}")

    def missing(self) -> set[int]:
        """Members that may still vote in this ballot."""
        return self._live() - self.votes.keys()

    def suspects(self) -> set[int]:
        """Members that others accuse, and that have not voted."""
        return {said.accused for said in self._said()} & self.missing()

    def only_stalled(self) -> set[int]:
        """The members without a vote, if all of them answer but sent the others nothing."""
        missing = self.missing()
        return missing if missing <= {said.accused for said in self._said() if said.is_stalled} else set()

    def has_order_for(self, rank: int, vote: Vote) -> bool:
        """Whether a member that cast this vote is to average again."""
        return self.order is not None and vote.ballot < self.order.ballot and rank in self.order.members

    def decide(self) -> Verdict | Order | None:
        """Decide by the votes, or return None while more are needed; an order begins the next ballot."""
        if self.verdict is not None:
            return self.verdict
        decision = self._decision()
        if isinstance(decision, Order):
            self._note_faults(lambda said: said.accused in self.lost and (said.is_stalled or said.is_violation))
            self.ballot, self.order, self.votes = decision.ballot, decision, {}
            self._members = set(decision.members)
        else:
            self.verdict = decision
        return decision

    def _decision(self) -> Verdict | Order | None:
        by_result = self._by_result()
        most = max(by_result.values(), key=len, default=[])
        is_won = self._is_majority(len(most))
        num_open = len(self.missing()) if not self._is_closed else 0  # nobody else is waited for any more
        if is_won and len(most) == len(self.votes) and not (self.lost and num_open):  # they may lack what was lost
            return self._commit(most)
        if not is_won and not self._is_majority(len(most) + num_open) and not self._is_majority(len(self._live())):
            return self._abort()
        if num_open:
            return None
        here = self._members_that_hear_each_other()
        can_average = self._is_majority(len(here)) and _includes_values(self.group, here)
        is_split = sum(not here.isdisjoint(ranks) for ranks in by_result.values()) > 1
        if can_average and not here <= set(most) and not is_split and (order := self._again(here)):
            return order
        if is_won:
            return self._commit(most)
        return self._abort(DIFFERENT if is_split and can_average else "")

    def _again(self, here: set[int]) -> Order | None:
        """Order the shortest slice that contains all parts that voters lack."""
        votes = [self.votes[rank] for rank in here]
        numel = Counter(vote.numel for vote in votes).most_common(1)[0][0]
        gaps = [vote.missing for vote in votes if vote.missing[0] < vote.missing[1] <= numel]
        if not gaps or self.ballot + 1 == MAX_BALLOTS or self._is_closed:
            return None
        start, stop = min(start for start, _ in gaps), max(stop for _, stop in gaps)
        return Order(self.ballot + 1, sorted(here), start, stop)

    def _by_result(self) -> dict[bytes, list[int]]:
        by_result: dict[bytes, list[int]] = defaultdict(list)
        for rank, vote in sorted(self.votes.items()):
            if vote.digest:
                by_result[vote.digest + msgspec.msgpack.encode(vote.parts)].append(rank)
        return by_result

    def _said(self) -> list[Accusation]:
        return [said for vote in self.votes.values() for said in vote.accusations]

    def _live(self) -> set[int]:
        return self._members - self.lost.keys()

    def _members_that_hear_each_other(self) -> set[int]:
        here = self._live() & self.votes.keys()
        said = [(rank, one) for rank in here for one in self.votes[rank].accusations if one.accused in here]
        gone = dropped(said, self.leader)
        self.faults |= gone
        return here - gone.keys()

    def _is_majority(self, num_members: int) -> bool:
        return 2 * num_members > len(self.group.members)

    # verdicts

    def _note_faults(self, counts: Callable[[Accusation], bool]) -> None:
        for said in filter(counts, self._said()):
            self.faults.setdefault(said.accused, said.reason)

    def _commit(self, ranks: Sequence[int]) -> Verdict:
        self._note_faults(lambda said: said.accused not in self.votes or said.is_violation)
        vote = self.votes[ranks[0]]
        return self._verdict(self.group.manifest(vote.digest, vote.parts), [])

    def _abort(self, why: str = "") -> Verdict:
        said = sorted({vote.reason for vote in self.votes.values() if vote.reason})
        return self._verdict(None, [why] if why else said)

    def _verdict(self, manifest: RoundManifest | None, said: Sequence[str]) -> Verdict:
        faults = {**self.lost, **self.faults}  # what a member did says more than that it is gone
        reasons = list(dict.fromkeys([*said, *(faults[rank] for rank in sorted(faults))]))
        if manifest is None and not reasons:
            reasons = [DIFFERENT]
        reason = "; ".join(reasons[:SHOWN_REASONS])[: SHOWN_REASONS * MAX_REASON_LENGTH]
        return Verdict(True, manifest, reason, sorted(self.group.members[rank].peer_id for rank in faults))


def _includes_values(group: Group, ranks: Iterable[int]) -> bool:
    """Whether some members include a reducer and one with values."""
    members = [group.members[rank] for rank in ranks]
    return any(not member.is_client for member in members) and any(member.weight > 0 for member in members)


# checks of received verdicts


def checked(group: Group, verdict: Verdict, vote: Vote | None = None, rank: int = 0) -> Verdict:
    """Check a verdict from another peer; it may be an order only in answer to a vote of the member of this rank.

    Raises:
        ProtocolViolation: it is not about this group, or not possible.
    """
    manifest, order = verdict.manifest, verdict.order
    if manifest is not None and not (
        manifest == group.manifest(manifest.digest, manifest.parts) and _are_whole(group, manifest.parts)
    ):
        raise ProtocolViolation(group.leader, "a verdict that is not about the group it was asked about")
    if (verdict.is_known and order is not None) or (manifest is not None and not verdict.is_known):
        raise ProtocolViolation(group.leader, "a verdict that is not about the group: it is known and open at once")
    if order is not None and not (vote is not None and _can_follow(group, order, vote, rank)):
        raise ProtocolViolation(group.leader, "an order that this member cannot follow")
    blamed = [peer_id for peer_id in verdict.blamed if group.rank_of(peer_id) is not None]
    return Verdict(verdict.is_known, manifest, readable(verdict.reason), blamed, order, verdict.is_open)


def _are_whole(group: Group, parts: Sequence[SpanResult]) -> bool:
    """Whether parts lie end to end, and name only members."""
    num_members, at = len(group.members), 0
    for part in parts:
        ranks = [part.reducer, *part.absent]
        if part.start != at or part.stop <= at or max(ranks) >= num_members or part.absent != sorted(set(part.absent)):
            return False
        at = part.stop
    return True


def _can_follow(group: Group, order: Order, vote: Vote, rank: int) -> bool:
    ranks = order.members
    is_sound = ranks == sorted(set(ranks)) and all(other < len(group.members) for other in ranks)
    is_next = order.ballot > vote.ballot and rank in ranks and order.start < order.stop <= vote.numel
    return is_sound and is_next and _includes_values(group, ranks)
