"""A group that is still forming, at its leader."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from manyhands.averaging.messages import JoinResponse, Member, Position, short_id
from manyhands.base.errors import Refused
from manyhands.base.identity import PeerId

ASK_AGAIN_S = 1.0


class PendingGroup:
    """A group that a leader is forming.

    Attributes:
        joined: the peers that have come.
        reserved: peers that hold places until their values are there; with expiry (loop time).
        stands: all expected peers hold places or have come.
        absent: peers that said that they do not come: on another branch, or at a later round of the grid.
        began: loop time.
        due_since: when the first member had its values (loop time); infinite before that.
        deadline: when the group closes with the members it has (loop time); infinite until a member has its values.
        leader_due: how long the most patient member waits for the leader itself (loop time); None if there is none.
        ends_at: end of the leader's time for the round (loop time).
        seen: clients that are connected to a member, by short id.
        hearsay: peers that only members know, by short id, and until when (loop time) they are waited for.
    """

    def __init__(self, position: Position, deadline: float) -> None:
        self.position = position
        self.deadline = deadline
        self.leader_due: float | None = None
        self.began = asyncio.get_running_loop().time()
        self.due_since = self.ends_at = math.inf
        self.seen: set[bytes] = set()
        self.joined: dict[PeerId, Member] = {}
        self.reserved: dict[PeerId, float] = {}
        self.stands = False
        self._turned = asyncio.Event()
        self.absent: set[PeerId] = set()
        self._ask_again_at: dict[PeerId, float] = {}
        self.hearsay: dict[bytes, float] = {}
        self._dues: dict[PeerId, float] = {}  # until when each member waits for the leader (loop time)
        self._refusals: dict[PeerId, asyncio.Future[Refused]] = {}
        self._let_go_on: set[PeerId] = set()  # members that stopped waiting for the leader
        self.changed = asyncio.Event()
        self.answer: asyncio.Future[JoinResponse] = asyncio.get_running_loop().create_future()
        self.answer.add_done_callback(lambda answer: answer.exception())  # waiting members get it, if any

    def add(self, member: Member) -> None:
        self.joined[member.peer_id] = member
        self.hearsay.pop(short_id(member.peer_id), None)
        self.changed.set()

    async def wait_with(self, member: Member, due: float) -> JoinResponse:
        """Give another peer a place and wait for the outcome, until ``due`` (loop time) if the leader does not come.

        Raises:
            PeerError, RoundAborted: why there is no group here, or no place for this peer.
        """
        peer_id = member.peer_id
        self._dues[peer_id], self.leader_due = due, max(due, self.leader_due or due)
        refusal = self._refusals[peer_id] = asyncio.get_running_loop().create_future()
        self.add(member)
        try:
            either: list[asyncio.Future[Any]] = [refusal, self.answer]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if refusal.done():
                raise refusal.result()
            return self.answer.result()
        finally:
            self.remove(member)

    def remove(self, member: Member) -> None:
        """Remove a member that no longer waits, unless it has asked again meanwhile."""
        if not self.answer.done() and self.joined.get(member.peer_id) is member:
            self._let_out(member.peer_id)

    def _let_out(self, peer_id: PeerId) -> None:
        del self.joined[peer_id]
        self._dues.pop(peer_id, None)
        self._ask_again_at.pop(peer_id, None)
        self.changed.set()

    def give_up_leader(self, now: float, refusal: Refused) -> None:
        """The leader has not come: refuse the members that stop waiting for it."""
        for peer_id in [peer_id for peer_id, due in self._dues.items() if due <= now]:
            self._let_out(peer_id)
            self._let_go_on.add(peer_id)
            self._refusals[peer_id].set_result(refusal)

    def lead(self, member: Member) -> None:
        """The leader has come: invite the members that went on without it again."""
        self._let_go_on.clear()
        self.add(member)

    def let_go(self, peer_id: PeerId) -> bool:
        """Release a member's place; False if the group has closed with it."""
        if self.answer.done():
            return peer_id not in self.joined
        if peer_id in self.joined:
            self._let_out(peer_id)  # it is invited again, and its answer names its leader
        return True

    def begin(self, deadline: float) -> None:
        """A member's values are there: set the deadline, and call the peers that hold places."""
        if self.deadline == math.inf:
            self.deadline, self.due_since = deadline, asyncio.get_running_loop().time()
            self._ask_again_at.clear()

    def left_s(self, leader: PeerId) -> float:
        """Seconds until the group must close."""
        is_led = leader in self.joined or self.leader_due is None
        until = self.deadline if is_led else min(self.deadline, self.leader_due or math.inf)
        return until - asyncio.get_running_loop().time()

    def next_due(self) -> float:
        """When the next member stops waiting for the leader (loop time)."""
        return min(self._dues.values(), default=math.inf)

    def have_places(self, now: float) -> set[PeerId]:
        """Peers that have come or still hold a place."""
        self.reserved = {peer_id: until for peer_id, until in self.reserved.items() if until > now}
        return self.joined.keys() | self.reserved.keys()

    def note_standing(self, stands: bool) -> None:
        """Tell the peers that hold places whether all expected peers do."""
        if stands != self.stands:
            self.stands = stands
            turned, self._turned = self._turned, asyncio.Event()
            turned.set()

    async def news(self, knows_it_stands: bool, timeout_s: float) -> JoinResponse:
        """Wait until ``stands`` changes, the group closes, or the timeout.

        Raises:
            PeerError, RoundAborted: why there is no group here.
        """
        if self.stands == knows_it_stands and not self.answer.done():
            turning = asyncio.get_running_loop().create_task(self._turned.wait())
            either: list[asyncio.Future[Any]] = [turning, self.answer]
            try:
                await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                turning.cancel()
        if not self.answer.done():
            return JoinResponse(stands=self.stands)
        end = self.answer.result()
        return JoinResponse(leader=end.leader, leader_addresses=end.leader_addresses)

    def is_to_be_asked(self, peer_id: PeerId, now: float) -> bool:
        """Whether it is time to invite a peer; one that did not come may have joined another group since."""
        if peer_id in self.absent | self._let_go_on or now < self._ask_again_at.get(peer_id, now):
            return False
        self._ask_again_at[peer_id] = now + ASK_AGAIN_S
        return True

    def leave_out(self, peer_id: PeerId) -> None:
        """Stop waiting for a peer that says that it does not come."""
        self.absent.add(peer_id)
        self.changed.set()

    def waits_for_hearsay(self, now: float) -> bool:
        self.hearsay = {short: until for short, until in self.hearsay.items() if until > now}
        return bool(self.hearsay)

    def close(self, answer: JoinResponse | Exception) -> None:
        """Answer all waiting members; only the first answer counts."""
        if self.answer.done():
            return
        if isinstance(answer, JoinResponse):
            self.answer.set_result(answer)
        else:
            self.answer.set_exception(answer)
        self.changed.set()
