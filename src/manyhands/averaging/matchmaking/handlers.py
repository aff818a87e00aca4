"""Answers other peers' matchmaking requests: for a place in a group, to leave it, and invitations."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.matchmaking.admission import (
    AVOIDED,
    OTHER_MANIFEST,
    PAUSED,
    REFUSED,
    UNKNOWN,
    check_ahead,
    check_join,
    is_later_round,
)
from manyhands.averaging.matchmaking.candidates import Candidates
from manyhands.averaging.matchmaking.leader import GroupLeader
from manyhands.averaging.messages import (
    INVITE,
    JOIN,
    LEAVE,
    InviteRequest,
    InviteResponse,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    LeaveResponse,
    Position,
    readable_addresses,
)
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.averaging.timing import LOOK_S, MOMENT_S
from manyhands.base.errors import Refused
from manyhands.base.identity import PeerId

MOVE_POLL_S = LOOK_S / 5
ROUND_GAP_S = MOMENT_S
"""Pause between two attempts of one step in a grid."""


class MatchmakingHandlers:
    """Serves JOIN, LEAVE and INVITE for one run, and holds what these share with this peer's own search.

    Attributes:
        following: the leader that this peer has asked for a place and waits for.
        busy_at: the position of its current round, or of a committed one until this peer moves.
        sought_at: when it last looked for a group (loop time); infinite during a search.
    """

    def __init__(
        self,
        endpoint: RunEndpoint,
        run_fingerprint: bytes,
        candidates: Candidates,
        group_leader: GroupLeader,
        config: AveragingConfig,
    ) -> None:
        self.endpoint = endpoint
        self.run_fingerprint = run_fingerprint
        self.candidates = candidates
        self.group_leader = group_leader
        self.config = config
        self.following: PeerId | None = None
        self.busy_at: Position | None = None
        self.sought_at = -math.inf
        self.on_called_ahead: list[Callable[[], None]] = []
        self._coming: dict[PeerId, JoinRequest] = {}  # requests that were not given a place yet
        self._inviter: tuple[PeerId, Position] | None = None
        self._better: asyncio.Future[PeerId] | None = None
        self._roster = candidates.roster
        endpoint.handle(JOIN, self._on_join)
        endpoint.handle(LEAVE, self._on_leave)
        endpoint.handle(INVITE, self._on_invite)

    def close(self) -> None:
        self.endpoint.unhandle(JOIN)
        self.endpoint.unhandle(LEAVE)
        self.endpoint.unhandle(INVITE)

    def follow(self, leader: PeerId) -> asyncio.Future[PeerId]:
        """Wait for a leader from now on; the future resolves to a better one when that calls."""
        self.following = leader
        self._better = asyncio.get_running_loop().create_future()
        return self._better

    def unfollow(self) -> None:
        """Stop waiting: the leader has answered, or is not asked any more."""
        self.following = self._better = None

    def invitation(self) -> PeerId | None:
        """The leader whose invitation this peer should follow, if any; each invitation counts once."""
        inviter, self._inviter = self._inviter, None
        if inviter is None or inviter[1] != self._roster.position() or not self._is_led_by(inviter[0]):
            return None
        return inviter[0]

    def _is_led_by(self, inviter: PeerId) -> bool:
        """Whether this peer should follow its inviter rather than lead."""
        rank, expected = self.candidates.rank, self.candidates.expected()
        is_before = rank(inviter) < rank(self.endpoint.peer_id) or inviter not in expected
        return (is_before or self.endpoint.client_mode) and self.group_leader.is_trusted(inviter)

    async def _on_invite(self, remote: PeerId, request: InviteRequest) -> InviteResponse:
        await self._catch_up(request.position)
        me = self.endpoint.peer_id
        if request.run_fingerprint not in (b"", self.run_fingerprint):
            raise Refused(me, OTHER_MANIFEST, "the model or the settings differ from those of this peer")
        here = self._roster.position()
        check_ahead(me, here, request.position)
        if request.position != here:
            return InviteResponse()
        await self._check_known(remote)
        if request.position != self._roster.position():
            return InviteResponse()
        if not self.candidates.is_heeded(remote):
            raise Refused(
                me, AVOIDED, "your peer failed this one twice in a row, so this one follows others for a while"
            )
        if not self.group_leader.is_trusted(remote):
            raise Refused(me, AVOIDED, "a peer whose values are in the state leads")
        if self.busy_at == request.position:
            self._inviter = remote, request.position  # it joins if that round fails; else it is ahead soon
            return InviteResponse()
        self._call(remote, is_early=request.is_early)
        if self.following is not None and self.candidates.rank(self.following) <= self.candidates.rank(remote):
            return self._follows(self.following) if self.following != remote else InviteResponse()
        self._inviter = remote, request.position
        if self._better is not None:
            if not self._better.done():
                self._better.set_result(remote)
            return InviteResponse()
        pending = self.group_leader.pending
        if pending is not None and self._is_led_by(remote):
            self.group_leader.send_to(remote)
        elif pending is not None and me in pending.joined:
            return self._follows(me)
        return InviteResponse()

    async def _check_known(self, remote: PeerId) -> None:
        """Refuse a peer that gets no place, or has no record, after another look, as it may be new."""
        me = self.endpoint.peer_id
        if self.candidates.is_refused(remote):
            raise Refused(me, REFUSED, "your values were too large in three rounds; you get no place for a while")
        if not self._roster.is_known(remote):
            await self.group_leader.look_again()
            if not self._roster.is_known(remote):
                raise Refused(me, UNKNOWN, "no record of this peer can be read here; the next round may know it")

    def _follows(self, leader: PeerId) -> InviteResponse:
        redirect = self.group_leader.redirect(leader)
        return InviteResponse(redirect.leader, redirect.leader_addresses)

    def _on_leave(self, remote: PeerId, request: LeaveRequest) -> LeaveResponse:
        if self._coming.pop(remote, None) is not None:
            return LeaveResponse()  # it gets no place
        return LeaveResponse(is_too_late=not self.group_leader.let_go(remote, request.position))

    async def _on_join(self, remote: PeerId, request: JoinRequest) -> JoinResponse:
        self._coming[remote] = request
        try:
            await self._check_join(remote, request)
            if self._coming.get(remote) is not request:  # it has left meanwhile, or asked again
                return JoinResponse()
        finally:
            if self._coming.get(remote) is request:
                del self._coming[remote]
        if self.following is not None:
            return self.group_leader.redirect(self.following)
        if self.candidates.is_paused(remote):
            wait_s = self.candidates.longest_wait_s
            reason = f"your peer was to blame twice in a row; it gets no place for {wait_s:g} s"
            raise Refused(self.endpoint.peer_id, PAUSED, reason)
        self.endpoint.learn(remote, readable_addresses(request.member.addresses))
        self._call(remote, is_early=request.is_early)
        if request.is_early:
            return await self.group_leader.reserve(remote, request.expects)
        return await self.group_leader.take_in(request)

    async def _check_join(self, remote: PeerId, request: JoinRequest) -> None:
        """Refuse a peer that may not join a group here, once this peer has come to its position."""
        await self._catch_up(request.position)
        me, is_client, here = self.endpoint.peer_id, self.endpoint.client_mode, self._roster.position()
        try:
            check_join(me, is_client, self.run_fingerprint, here, remote, request)
        except Refused as refusal:
            if refusal.code == OTHER_MANIFEST and remote in self.candidates.expected():
                self.candidates.note_refusal(remote, refusal)  # it cannot come
            raise
        await self._check_known(remote)
        if self._roster.position() != here:  # it took a while
            check_join(me, is_client, self.run_fingerprint, self._roster.position(), remote, request)

    def _call(self, remote: PeerId, *, is_early: bool) -> None:
        """Call this peer to the round; one that is alone heeds anybody, as nobody expects an auxiliary peer."""
        if self.candidates.expected() and not self.group_leader.is_trusted(remote):
            return  # this peer comes once it has read that the step is due
        if not is_early:
            self._roster.call_to_round()
            return
        for notify in self.on_called_ahead:
            notify()

    async def _catch_up(self, position: Position) -> None:
        """Wait for this peer to reach a position that others may have reached a moment earlier."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.matchmaking_time_s
        while (here := self._roster.position()).step < position.step:
            now, is_later = loop.time(), is_later_round(position, here)
            is_coming = self.busy_at == here or (is_later and now < self.sought_at + ROUND_GAP_S)
            if not is_coming or now > deadline:
                return
            await asyncio.sleep(MOVE_POLL_S)
