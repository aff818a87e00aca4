"""A group while it forms, at its leader."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from manyhands.averaging.matchmaking.candidates import short_id
from manyhands.averaging.messages import JoinResponse, Member, Position
from manyhands.base.errors import Refused
from manyhands.base.identity import PeerId

ASK_AGAIN_S = 1.0


class PendingGroup:
    """A group that a leader is forming.

    Attributes:
        joined: who has come.
        reserved: who holds a place, and comes once its values are there; until when (loop time).
        stands: all who are expected hold places, or have come.
        absent: who has said that it does not come: it is on another branch, or at a later round of the grid.
        began: loop time.
        due_since: when somebody's values were there first (loop time); infinite before that.
        deadline: when it is closed with who has come then (loop time); infinite until somebody's values are there.
        leader_due: until when the most patient one that has come waits for the leader itself (loop time); None if
            nobody has.
        ends_at: until when the leader has time for the round (loop time).
        seen: clients that are connected to a member, by short id.
        hearsay: those of whom only members know, by short id, and until when (loop time) they are waited for.
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
        self._dues: dict[PeerId, float] = {}  # until when each waits for the leader (loop time)
        self._refusals: dict[PeerId, asyncio.Future[Refused]] = {}
        self._let_go_on: set[PeerId] = set()  # who did not wait for the leader any longer
        self.changed = asyncio.Event()
        self.answer: asyncio.Future[JoinResponse] = asyncio.get_running_loop().create_future()
        self.answer.add_done_callback(lambda answer: answer.exception())  # those who wait get it; perhaps nobody does

    def add(self, member: Member) -> None:
        self.joined[member.peer_id] = member
        self.hearsay.pop(short_id(member.peer_id), None)
        self.changed.set()

    async def wait_with(self, member: Member, due: float) -> JoinResponse:
        """Give another peer a place, and wait for the end; until ``due`` (loop time), if the leader does not come.

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
        """A member no longer waits; it may have asked again meanwhile, and then that counts."""
        if not self.answer.done() and self.joined.get(member.peer_id) is member:
            self._let_out(member.peer_id)

    def _let_out(self, peer_id: PeerId) -> None:
        del self.joined[peer_id]
        self._dues.pop(peer_id, None)
        self._ask_again_at.pop(peer_id, None)
        self.changed.set()

    def give_up_leader(self, now: float, refusal: Refused) -> None:
        """The leader has not come: tell those who do not wait for it any longer."""
        for peer_id in [peer_id for peer_id, due in self._dues.items() if due <= now]:
            self._let_out(peer_id)
            self._let_go_on.add(peer_id)
            self._refusals[peer_id].set_result(refusal)

    def lead(self, member: Member) -> None:
        """The leader has come; those who went on without it are called again."""
        self._let_go_on.clear()
        self.add(member)

    def let_go(self, peer_id: PeerId) -> bool:
        """A member does not want its place any more; False if the group has closed with it."""
        if self.answer.done():
            return peer_id not in self.joined
        if peer_id in self.joined:
            self._let_out(peer_id)  # and is asked again: it says with whom it is
        return True

    def begin(self, deadline: float) -> None:
        """Somebody's values are there: from now on there is a bound, and those who hold places are called."""
        if self.deadline == math.inf:
            self.deadline, self.due_since = deadline, asyncio.get_running_loop().time()
            self._ask_again_at.clear()

    def left_s(self, leader: PeerId) -> float:
        """How long it may go on."""
        is_led = leader in self.joined or self.leader_due is None
        until = self.deadline if is_led else min(self.deadline, self.leader_due or math.inf)
        return until - asyncio.get_running_loop().time()

    def next_due(self) -> float:
        """When the next one has waited for the leader for as long as it wants to (loop time)."""
        return min(self._dues.values(), default=math.inf)

    def have_places(self, now: float) -> set[PeerId]:
        """Who has come, or will."""
        self.reserved = {peer_id: until for peer_id, until in self.reserved.items() if until > now}
        return self.joined.keys() | self.reserved.keys()

    def note_standing(self, stands: bool) -> None:
        """Tell those who hold places whether all who are expected do."""
        if stands != self.stands:
            self.stands = stands
            turned, self._turned = self._turned, asyncio.Event()
            turned.set()

    async def news(self, knows_it_stands: bool, timeout_s: float) -> JoinResponse:
        """Wait until the group stands, or does not any more, or there is an end; at most so long.

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
        """Whether it is time to invite a peer; who does not come may have gone to another group meanwhile."""
        if peer_id in self.absent | self._let_go_on or now < self._ask_again_at.get(peer_id, now):
            return False
        self._ask_again_at[peer_id] = now + ASK_AGAIN_S
        return True

    def leave_out(self, peer_id: PeerId) -> None:
        """Do not wait for a peer that says that it does not come."""
        self.absent.add(peer_id)
        self.changed.set()

    def waits_for_hearsay(self, now: float) -> bool:
        self.hearsay = {short: until for short, until in self.hearsay.items() if until > now}
        return bool(self.hearsay)

    def close(self, answer: JoinResponse | Exception) -> None:
        """Answer all who wait; only the first answer counts."""
        if self.answer.done():
            return
        if isinstance(answer, JoinResponse):
            self.answer.set_result(answer)
        else:
            self.answer.set_exception(answer)
        self.changed.set()
