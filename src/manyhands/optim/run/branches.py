"""Chooses the branch of the run that a peer should be on, from the others' records. Pure; times are loop times.

A *branch* is a position that some peers hold, with its lineage: all that was committed on the way there. Of the
branches that a peer believes in (:mod:`manyhands.optim.run.belief`), the one with the highest (global step, samples in
its lineage, lineage digest) is the best one, and leads. There is one exception: if most peers have been on a lower
branch for a while, the peers of the higher branch go over to them.

What happens after a run has split, and the parts see each other again. Each peer sees in the others' records that their
lineage is another one, and decides by the electorate that it believes, usually the voters of its roster
(:mod:`.belief`). Higher is the branch that leads by the rule above:

=====================================  ================================  ==============================================
voters of the roster at the split      peers on the higher branch        peers on the lower branch
=====================================  ================================  ==============================================
more than half on the higher branch    go on                             load the state of the higher one at once
half on each branch                    go on                             the same: half of the votes is enough
more than half on the lower branch     load the state of the lower one   go on
                                       after ``STALL_S``
=====================================  ================================  ==============================================

Each part makes its own changes to its roster only while it has more than half of the voters; a smaller part founds a
roster of its own after ``MAX_FROZEN`` rounds (:mod:`manyhands.averaging.roster`).

The steps that the losing branch has committed since the split are lost, and so are the samples in them. Samples that
wait for the next step on a peer that changes branches are dropped (``step/global_step.py``): they were computed on
other parameters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.timing import DIAL_S, SHUN_S
from manyhands.base.identity import PeerId
from manyhands.optim.run.belief import Belief, Records, is_ahead
from manyhands.optim.run.progress import Claim, branch_order

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Branch:
    """A position of the run, and the peers that have its state."""

    position: Position
    holders: tuple[PeerId, ...]


def leading_branch(others: Records, own_id: PeerId, own: PeerRecord) -> Branch:
    """The best branch, which all peers should be on.

    At step 0 nothing has been learnt yet, and the highest :class:`.progress.Claim` wins
    (docs/adr/0030-initial-parameters.md). Of equal claims, the peer with the lowest id wins: among the trainers that
    accept connections, so that all can load its state; if there are none, among the auxiliary peers that do; and if
    there are none of these, among all.
    """
    candidates = {**others, own_id: own}
    best = max(candidates.values(), key=branch_order)
    if best.position.step == 0:
        candidates = {peer_id: record for peer_id, record in candidates.items() if record.claim == best.claim}
        hosts = {peer_id: record for peer_id, record in candidates.items() if not record.is_client}
        trainers = {peer_id: record for peer_id, record in hosts.items() if not record.is_auxiliary}
        candidates = trainers or hosts or candidates
        best = candidates[min(candidates)]
    holders = [peer_id for peer_id, record in candidates.items() if record.position == best.position]
    return Branch(best.position, tuple(sorted(holders)))


def _not_followed(claims: Records) -> str:
    first, step = min(claims), max(record.position.step for record in claims.values())
    if len(claims) == 1:
        return f"Peer {first} claims that the run is at step {step}, but too few others do: it is not followed"
    return (
        f"{len(claims)} peers, {first} among them, claim that the run is at step {step}, but too few of those that "
        "train with this peer do: they are not followed. If you know these peers, the run was begun twice: restart "
        "the peers on this side, which then load the state of the others"
    )


class _Shunned(NamedTuple):
    until: float  # loop time
    reason: str


class BranchChoice:
    """Chooses one peer's branch from the records given to the last :meth:`look`.

    Attributes:
        belief: decides which claims of the others this peer believes.
        believed: the others' records, except those that claim to be ahead and are not believed, or not yet.
        is_joining: this peer does not train yet.
        has_begun_run: this peer was the first to sign the settings of the run, or its user says that it begins it.
        run_step: the highest global step at which this peer has seen the run, while it was at step 0 itself; else 0. It
            is kept when the peers there have gone. It comes from records that this peer believes, and from the headers
            of states that it began to download.
    """

    def __init__(self, own_id: PeerId, own: PeerRecord, carries_bulk: Callable[[PeerId], bool]) -> None:
        self.belief = Belief(own_id)
        self.believed: Records = {}
        self.is_joining = True
        self.has_begun_run = False
        self.run_step = 0
        self._own_id = own_id
        self._own = own
        self._carries_bulk = carries_bulk
        self._records: Records = {}
        self._plausible: Records = {}  # the believed records, and those that this peer cannot judge yet
        self._unbelieved_since: dict[PeerId, float] = {}  # infinite once logged
        self._shunned: dict[PeerId, _Shunned] = {}
        self._majority: Position | None = None  # the result of :meth:`Belief.other_majority`

    def look(self, own: PeerRecord, records: Records, now: float) -> None:
        """Judge again, after a change of the others' records or this peer's position."""
        self._own, self._records = own, records
        if own.position not in self.belief.been_at:
            self.belief.been_at.append(own.position)
        self._majority = self.belief.other_majority(own, records, now)
        unbelieved, undecided = self.belief.judge(own, records)
        self._unbelieved_since = {peer_id: self._unbelieved_since.get(peer_id, now) for peer_id in unbelieved}
        # a true claim may have too few votes for a moment, until the records of the other voters are read
        to_log = sorted(one for one in unbelieved if now >= self._unbelieved_since[one] + DIAL_S)
        if to_log:
            self._unbelieved_since.update(dict.fromkeys(to_log, math.inf))
            logger.warning("%s", _not_followed({peer_id: records[peer_id] for peer_id in to_log}))
        self._shunned = {peer_id: shunned for peer_id, shunned in self._shunned.items() if shunned.until > now}
        shunned = {peer_id for peer_id in self._shunned.keys() & records.keys() if is_ahead(records[peer_id], own)}
        self._plausible = {peer: record for peer, record in records.items() if peer not in unbelieved | shunned}
        self.believed = {peer: record for peer, record in self._plausible.items() if peer not in undecided}
        if own.position.step == 0 and (self.is_joining or not self.has_begun_run):
            # a peer whose user says that it begins the run does not wait for peers that it has not reached
            seen = self._plausible if self._is_new and own.claim != Claim.TOLD else self.believed
            self.run_step = max([self.run_step, *(record.position.step for record in seen.values())])

    def shun(self, peer_id: PeerId, now: float, reason: str) -> None:
        """Ignore a peer's claims of a better branch for ``SHUN_S`` seconds, as it sent a state that cannot be used."""
        self._shunned[peer_id] = _Shunned(now + SHUN_S, reason)
        if self.has_begun_run:  # it waits for no liar: the others that are there are noted again
            self.run_step = 0

    def lacks_state(self) -> bool:
        """Whether this peer must make no step: it is at step 0, and the run was seen beyond it.

        It knows neither of a peer with a state that it can use, nor of one that trains at its own position.
        """
        here = self._own.position
        if here.step or not self.run_step or self.best().position != here:
            return False
        return not any(one.position == here and not one.is_auxiliary for one in self.believed.values())

    def refusal(self) -> str:
        """Why a peer that lacks the state could not use the one that it has got; empty if it has got none."""
        return next((shunned.reason for shunned in self._shunned.values()), "") if self.lacks_state() else ""

    def can_hand_out(self, peer_id: PeerId) -> bool:
        """Whether this peer could get another one's state; a peer in client mode must be connected to it for that."""
        record = self._records.get(peer_id)
        if record is None or not record.is_client:
            return record is not None
        return not self._own.is_client and self._carries_bulk(peer_id)

    def leading(self, without_state: Collection[PeerId]) -> Branch:
        """The branch that this peer should be on, among those whose state it can get.

        Args:
            without_state: peers that have failed to send their state; they do not count.
        """
        believed = {peer_id: self.believed[peer_id] for peer_id in self.believed if peer_id not in without_state}
        return self._chosen(self._within_reach(believed))

    def best(self) -> Branch:
        """The best known branch.

        A peer that has made no step itself waits for claims that it cannot judge yet. For one that has nothing to lose,
        the best branch may be one whose state only clients have: it waits until one of them has connected to it. For
        all others, it is a branch whose state they can get.
        """
        if self._is_new:
            return self._chosen(self._plausible)
        return self._chosen(self._within_reach(self.believed if self.belief.has_stepped else self._plausible))

    @property
    def _is_new(self) -> bool:
        """Whether this peer has nothing to lose: it is at step 0 without samples, and accepts connections."""
        return not (self._own.is_client or self._own.samples or self._own.position.step)

    def waits_for_clients(self) -> bool:
        """Whether only clients have the state that this peer needs: one of them must connect to it."""
        best = self.best()
        return best.position != self._own.position and not any(map(self.can_hand_out, best.holders))

    def _chosen(self, others: Records) -> Branch:
        """The branch of the majority, if that has been on a lower one for a while; else the leading branch."""
        holders = [
            peer_id for peer_id, record in sorted(self._records.items())
            if record.position == self._majority and peer_id not in self._shunned and self.can_hand_out(peer_id)
        ]  # fmt: skip
        if self._majority is not None and holders:
            return Branch(self._majority, tuple(holders))
        return leading_branch(others, self._own_id, self._own)

    def _within_reach(self, records: Records) -> Records:
        """The records of this peer's branch, and of those whose state this peer can get."""
        here = self._own.position
        return {one: record for one, record in records.items() if record.position == here or self.can_hand_out(one)}
