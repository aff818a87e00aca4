"""A group while it forms, at its leader."""

from __future__ import annotations

import asyncio

from manyhands.averaging.messages import JoinResponse, Member, Position
from manyhands.base.identity import PeerId


class Gathering:
    """A group that a leader is forming."""

    def __init__(self, position: Position, deadline: float) -> None:
        self.position = position
        self.deadline = deadline
        self.joined: dict[PeerId, Member] = {}
        self.changed = asyncio.Event()
        self.answer: asyncio.Future[JoinResponse] = asyncio.get_running_loop().create_future()
        self.answer.add_done_callback(lambda answer: answer.exception())  # those who wait get it; perhaps nobody does

    def add(self, member: Member) -> None:
        self.joined[member.peer_id] = member
        self.changed.set()

    def remove(self, member: Member) -> None:
        """A member no longer waits; it may have asked again meanwhile, and then that counts."""
        if not self.answer.done() and self.joined.get(member.peer_id) is member:
            del self.joined[member.peer_id]
            self.changed.set()

    def close(self, answer: JoinResponse | Exception) -> None:
        """Answer all who wait; only the first answer counts."""
        if self.answer.done():
            return
        if isinstance(answer, JoinResponse):
            self.answer.set_result(answer)
        else:
            self.answer.set_exception(answer)
        self.changed.set()
