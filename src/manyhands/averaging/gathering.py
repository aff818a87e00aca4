"""A group while it forms, at its leader."""

from __future__ import annotations

import asyncio

from manyhands.averaging.messages import JoinResponse, Member, Position
from manyhands.averaging.view import short_id
from manyhands.base.identity import PeerId

ASK_AGAIN_S = 1.0


class Gathering:
    """A group that a leader is forming.

    Attributes:
        joined: who has come.
        absent: who has said that it does not come: it is in another group, or at a later round of the grid.
        began: loop time.
        seen: clients that are connected to a member, by short id.
        hearsay: those of whom only members know, by short id, and until when (loop time) they are waited for.
    """

    def __init__(self, position: Position, deadline: float) -> None:
        self.position = position
        self.deadline = deadline
        self.began = asyncio.get_running_loop().time()
        self.seen: set[bytes] = set()
        self.joined: dict[PeerId, Member] = {}
        self.absent: set[PeerId] = set()
        self._ask_again_at: dict[PeerId, float] = {}
        self.hearsay: dict[bytes, float] = {}
        self.changed = asyncio.Event()
        self.answer: asyncio.Future[JoinResponse] = asyncio.get_running_loop().create_future()
        self.answer.add_done_callback(lambda answer: answer.exception())  # those who wait get it; perhaps nobody does

    def add(self, member: Member) -> None:
        self.joined[member.peer_id] = member
        self.hearsay.pop(short_id(member.peer_id), None)
        self.changed.set()

    def remove(self, member: Member) -> None:
        """A member no longer waits; it may have asked again meanwhile, and then that counts."""
        if not self.answer.done() and self.joined.get(member.peer_id) is member:
            del self.joined[member.peer_id]
            self._ask_again_at.pop(member.peer_id, None)
            self.changed.set()

    def is_to_be_asked(self, peer_id: PeerId, now: float) -> bool:
        """Whether it is time to invite a peer; who does not come may have gone to another group meanwhile."""
        if peer_id in self.absent or now < self._ask_again_at.get(peer_id, now):
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
