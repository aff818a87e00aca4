"""The leader's count of votes: a round commits when more than half of its group hold the same result. Pure.

======================================================  =========================================
votes so far                                            decision
======================================================  =========================================
more than half of the group sent the same digest        commit, with that digest
no digest can reach more than half any more             abort; blames the members that were lost
else                                                    none yet
======================================================  =========================================

A member that was lost counts as one that holds no result. Nobody is blamed on the word of others: who closes its
streams because a third member died looks dead to the rest.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from manyhands.averaging.messages import Group, Verdict, Vote
from manyhands.base.identity import PeerId


@dataclass
class Ballot:
    """Collects one vote of each member; the first of a member counts."""

    group: Group
    votes: dict[PeerId, Vote] = field(default_factory=dict)
    lost: set[PeerId] = field(default_factory=set)

    def add(self, member: PeerId, vote: Vote) -> None:
        """Count the vote of a member; others and second votes are ignored."""
        if self.group.rank_of(member) is not None:
            self.votes.setdefault(member, vote)

    def add_lost(self, member: PeerId, reason: str) -> None:
        """Count a member that can no longer vote."""
        if self.group.rank_of(member) is not None and member not in self.votes:
            self.lost.add(member)
            self.add(member, Vote(self.group.group_id, b"", reason))

    def decide(self) -> Verdict | None:
        """The verdict, or None while it is open."""
        num_members = len(self.group.members)
        held = Counter(vote.digest for vote in self.votes.values() if vote.digest)
        digest, num_held = held.most_common(1)[0] if held else (b"", 0)
        if 2 * num_held > num_members:
            return Verdict(True, self.group.manifest(digest))
        num_open = num_members - len(self.votes)
        if 2 * (num_held + num_open) > num_members:
            return None
        return self._abort()

    def _abort(self) -> Verdict:
        reasons = sorted({vote.reason for vote in self.votes.values() if vote.reason})
        if not reasons:
            reasons = ["the members hold different results"]
        return Verdict(True, None, "; ".join(reasons[:3]), sorted(self.lost))
