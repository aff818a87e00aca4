"""How the leader of a group decides its round: votes go in, a decision comes out. Pure.

Only the leader counts votes, so only one peer can decide, once for each exchange (:mod:`.round_machine`):

==========================================================  ========================================================
votes of the exchange                                       decision
==========================================================  ========================================================
more than half of the voters hold the same result           commit that result
votes are missing, and a commit or another exchange is      none yet; but a guest of which more than half of the
still possible                                              voters complain is not waited for
more than half of the voters hear each other, and fewer     exchange again, among those that hear each other
than have taken part
anything else                                               abort
==========================================================  ========================================================

The *voters* are those of the run's roster that are in the group (``Matchmaker.voters``); where none is, all of
the group. If they are not more than half of the roster, the round commits all the same, but changes no standing: only
turns to lead and trouble are noted (``averaging/roster.py``). What guests hold and say does not count: identities are
free, so otherwise as many guests as the run has members could stop every round.

Two members do not hear each other if one complains of the other, or if one holds other means of the other's span than
most do. So a reducer that sends different means to different members is left out of the next exchange, unless more than
half of the voters hold the same: then these commit, and the verdict blames it. Of members that do not hear each other,
those in most complaints are left out first; :func:`dropped` has the order.

A lost member that only sent values costs nothing, as what it had delivered is in the mean that all hold. A lost member
whose means the others lack costs one more exchange.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from manyhands.averaging.messages import (
    MAX_REASON_LENGTH,
    Again,
    Complaint,
    Group,
    RoundManifest,
    SpanResult,
    Verdict,
    Vote,
)

MAX_EXCHANGES = 4
"""Limit for one round. A member that dies costs one exchange; if members keep dying, a new group is better."""
SHOWN_REASONS = 3
"""Limit of the reasons in a verdict: more would make a log line unreadable."""
DIFFERENT = "the members hold different results"
UNLIKE = "sent different members different means"


class Count:
    """The leader's count of the votes in one round.

    Attributes:
        exchange: number of the exchange whose votes are counted now.
        again: the leader's order that began this exchange; None in the first one.
        voters: ranks whose votes count.
        votes: by rank; the first vote of a member counts.
        lost: members that cannot vote any more, by rank, with the reason.
        left_out: members that take no part any more, by rank, with the reason.
        is_closed: whether the next decision is the verdict, whatever votes come.
    """

    def __init__(self, group: Group, voters: Collection[int] | None = None) -> None:
        leader = group.rank_of(group.leader)
        assert leader is not None
        self.group = group
        self.leader = leader
        self.exchange = 0
        self.again: Again | None = None
        self.votes: dict[int, Vote] = {}
        self.lost: dict[int, str] = {}
        self.left_out: dict[int, str] = {}
        self.voters = self.members if voters is None else frozenset(voters)
        self.is_closed = False

    @property
    def members(self) -> frozenset[int]:
        """Ranks that take part in the exchange whose votes are counted now."""
        return frozenset(range(len(self.group.members))).difference(self.left_out)

    def add(self, rank: int, vote: Vote) -> None:
        """Count a vote. Votes on other exchanges, and votes of members that were left out, are ignored."""
        if rank in self.members and vote.exchange == self.exchange:
            self.lost.pop(rank, None)
            num_members = len(self.group.members)
            vote.complaints = [said for said in vote.complaints if said.about < num_members]
            if len(vote.digests) != num_members:
                vote.digests = []
            self.votes.setdefault(rank, vote)

    def lose(self, rank: int, reason: str) -> None:
        """Expect no further vote from a member; the vote that it has cast stays."""
        self.lost.setdefault(rank, reason)

    def close(self, reason: str) -> None:
        """The time is over: members without a vote are lost, and the next decision is the verdict."""
        self.is_closed = True
        for rank in self.missing():
            self.lose(rank, f"{self.group.members[rank].peer_id}: {reason}")

    def give_up(self, reason: str) -> None:
        """The leader ends its round early: the next decision is the verdict, and only the leader is lost."""
        self.is_closed = True
        self.lose(self.leader, f"{self.group.leader}: {reason}")

    def missing(self) -> set[int]:
        """Members that may still vote on this exchange."""
        return self._live() - self.votes.keys()

    def only_stalled(self) -> set[int]:
        """The members without a vote, if all of them answer but sent the others nothing.

        At least half of the voters must have voted: otherwise one that votes at once could have all others left out.
        """
        missing = self.missing()
        are_few = 2 * len(missing & self.voters) <= len(self.voters & self.members)
        return missing if are_few and missing <= {said.about for said in self._said() if said.is_stalled} else set()

    def decide(self) -> Verdict | Again | None:
        """Decide by the votes, or return None while more are needed; after ``Again`` the next exchange is counted."""
        most = max(self._by_result().values(), key=len, default=[])
        if self._is_majority(most):
            return self._commit(most)
        self._lose_useless_guests()
        missing = set() if self.is_closed else self.missing()
        if missing and (self._is_majority(self._live()) or self._is_majority(missing.union(most))):
            return None  # other guests are waited for, too, so that the next exchange has them
        at_fault = self._at_fault()
        here = (self._live() & self.votes.keys()) - at_fault.keys()
        can_average = self._is_majority(here) and includes_values(self.group, here)
        if can_average and here < self.members and self.exchange + 1 < MAX_EXCHANGES and not self.is_closed:
            return self._exchange_again(here, at_fault)
        return self._verdict(None, at_fault)

    def _by_result(self) -> dict[bytes, list[int]]:
        """The voters that hold each result."""
        by_result: dict[bytes, list[int]] = defaultdict(list)
        for rank, vote in sorted(self.votes.items()):
            if vote.digests and rank in self.voters:
                by_result[msgspec.msgpack.encode((vote.digests, vote.parts))].append(rank)
        return by_result

    def _said(self) -> list[Complaint]:
        """The complaints in the votes of voters."""
        return [said for rank, vote in self.votes.items() if rank in self.voters for said in vote.complaints]

    def _lose_useless_guests(self) -> None:
        """Expect no vote of a guest of which more than half of the voters complain: the next exchange is without it."""
        for guest in self.missing() - self.voters:
            said = {rank: one for rank, vote in self.votes.items() for one in vote.complaints if one.about == guest}
            if self._is_majority(said):
                self.lose(guest, next(said[rank].reason for rank in said if rank in self.voters))

    def _live(self) -> set[int]:
        return set(self.members - self.lost.keys())

    def _at_fault(self) -> dict[int, str]:
        """The members to leave out, with the reason, so that the others that have voted all hear each other."""
        here = self._live() & self.votes.keys()
        said = [(rank, one) for rank in here & self.voters for one in self.votes[rank].complaints]
        said += [(rank, one) for rank, one in self._different() if rank in here]
        guests = {one.about: one.reason for _, one in said if one.about in here - self.voters}
        return guests | dropped(((rank, one) for rank, one in said if one.about in here & self.voters), self.leader)

    def _different(self) -> list[tuple[int, Complaint]]:
        """For each voter that holds other means of a span than most: its rank, and its complaint of the reducer."""
        held = {
            rank: _spans_of(vote) for rank, vote in sorted(self.votes.items()) if vote.digests and rank in self.voters
        }
        said: list[tuple[int, Complaint]] = []
        for reducer, member in enumerate(self.group.members if held else []):
            usual, _ = Counter(spans[reducer] for spans in held.values()).most_common(1)[0]
            one = Complaint(reducer, f"peer {member.peer_id} {UNLIKE}", is_violation=True)
            said += [(rank, one) for rank, spans in held.items() if spans[reducer] != usual]
        return said

    def _is_majority(self, ranks: Collection[int]) -> bool:
        return 2 * len(self.voters.intersection(ranks)) > len(self.voters)

    # decisions

    def _exchange_again(self, here: Collection[int], at_fault: Mapping[int, str]) -> Again:
        silent = {said.about: said.reason for said in reversed(self._said()) if said.is_stalled or said.is_violation}
        reasons = {**self.lost, **silent, **at_fault}  # what a member did says more than that it is gone
        self.left_out = self.left_out | {rank: reasons[rank] for rank in self.members.difference(here)}
        self.again = Again(self.exchange + 1, sorted(here))
        self.exchange, self.votes = self.again.exchange, {}
        return self.again

    def _commit(self, ranks: Sequence[int]) -> Verdict:
        vote = self.votes[ranks[0]]
        blamed: dict[int, str] = {}
        for said in self._said():
            if said.about not in self.votes or said.is_violation:
                blamed.setdefault(said.about, said.reason)
        manifest = self.group.manifest(vote.digest, vote.parts, self.members)
        return self._verdict(manifest, {**blamed, **self._at_fault()})

    def _verdict(self, manifest: RoundManifest | None, at_fault: Mapping[int, str]) -> Verdict:
        faults = {**self.lost, **at_fault, **self.left_out}
        said = {vote.reason for vote in self.votes.values() if vote.reason} if manifest is None else set[str]()
        reasons = list(dict.fromkeys([*sorted(said), *(faults[rank] for rank in sorted(faults))]))
        if manifest is None and not reasons:
            reasons = [DIFFERENT]
        reason = "; ".join(reasons[:SHOWN_REASONS])[: SHOWN_REASONS * MAX_REASON_LENGTH]
        return Verdict(True, manifest, reason, sorted(self.group.members[rank].peer_id for rank in faults))


def _spans_of(vote: Vote) -> list[bytes]:
    """For each span, by rank of its reducer, bytes that are equal if the means and their contributors are."""
    absent: dict[int, list[SpanResult]] = defaultdict(list)
    for part in vote.parts:
        if part.absent:  # parts to which all contributed are not always listed
            absent[part.reducer].append(part)
    return [digest + msgspec.msgpack.encode(absent[rank]) for rank, digest in enumerate(vote.digests)]


def dropped(complaints: Iterable[tuple[int, Complaint]], leader: int) -> dict[int, str]:
    """Choose the members to leave out, so that of two members of which one complains of the other, at most one stays.

    Returns the reasons.

    The member with the most quarrels goes first. Of two, it is the one that sent something forbidden, then the one that
    sent nothing, then the one that does not lead, then the higher rank. A member that complains of itself goes.
    """
    pairs = {(by, said.about): said for by, said in complaints}
    gone: dict[int, str] = {}
    while pairs:
        score = Counter[int]()
        violations = Counter[int]()
        stalls = Counter[int]()
        for (by, about), said in pairs.items():
            for rank in {by, about}:
                score[rank] += len(pairs) + 1 if by == about else 1
            violations[about] += said.is_violation
            stalls[about] += said.is_stalled
        worst = max(score, key=lambda rank: (score[rank], violations[rank], stalls[rank], rank != leader, rank))
        against = [said for (_, about), said in pairs.items() if about == worst]
        most = max(against, key=lambda said: (said.is_violation, said.is_stalled), default=None)
        gone[worst] = most.reason if most is not None else "it does not reach the others"
        pairs = {pair: said for pair, said in pairs.items() if worst not in pair}
    return gone


def includes_values(group: Group, ranks: Iterable[int]) -> bool:
    """Whether these members include one that can reduce, and one with values."""
    members = [group.members[rank] for rank in ranks]
    return any(member.can_reduce for member in members) and any(member.weight > 0 for member in members)
