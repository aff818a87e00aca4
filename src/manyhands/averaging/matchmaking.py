"""How the peers that are ready for a round find each other.

The leader is the lowest peer id among those who are expected and can be dialled. Everybody who is ready asks the leader
it believes in for a place; a peer that itself follows another leader answers with that one, so different views settle
on the lowest. The leader invites whom it expects; a peer that leads too and is invited by a lower one joins that one,
with all its followers. The leader closes the group as soon as all expected peers have asked, or at the matchmaking
time with who came. Whoever cannot be reached is left out of this round, and not expected again before a fresh record
of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from manyhands.averaging.codec_choice import allowed_codec, chosen_codec
from manyhands.averaging.codecs import BadEncoding
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.gathering import Gathering
from manyhands.averaging.messages import (
    INVITE,
    JOIN,
    MAX_ADDRESSES,
    Group,
    InviteRequest,
    InviteResponse,
    JoinRequest,
    JoinResponse,
    Member,
    Position,
    readable_addresses,
)
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ManyhandsError, PeerError, Refused, RoundAborted, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

ROSTER_POLL_S = 0.2
MOVE_POLL_S = 0.05
LOOK_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 5.0
"""What a leader's answer may take beyond the time that it gathers for, at most."""
MAX_REDIRECTS = 8
FLOAT_BYTES = 4
BEHIND = "behind"
"""Code of a refusal: the asked peer has made steps that the asking one has not."""


class Roster(Protocol):
    """What matchmaking needs to know of the run."""

    def position(self) -> Position:
        """Where this peer stands."""

    def expected(self) -> Mapping[PeerId, bool]:
        """The other peers at this position that should come to the next round, and whether each is in client mode."""

    async def refresh(self) -> None:
        """Learn who is there now."""

    def report_missing(self, peer_id: PeerId) -> None:
        """A peer did not come; it is not expected again before a fresh record of it."""

    def call_to_round(self) -> None:
        """Another peer has begun a round at this position; the training loop should come as soon as it can."""


class Matchmaker:
    """Finds the group of one run for this peer, as follower or leader."""

    def __init__(
        self,
        endpoint: Endpoint,
        run_id: str,
        run_fingerprint: bytes,
        roster: Roster,
        config: AveragingConfig,
        rng: random.Random,
    ) -> None:
        self._endpoint = endpoint
        self._run_id = run_id
        self._run_fingerprint = run_fingerprint
        self._roster = roster
        self._config = config
        self._rng = rng
        self._gathering: Gathering | None = None
        self._following: PeerId | None = None
        self._inviter: tuple[PeerId, Position] | None = None
        self._busy_at: Position | None = None
        self._gather_s = config.matchmaking_time_s
        self._is_closed = False
        self._tasks = TaskOwner("matchmaking")
        endpoint.handle(JOIN, self._on_join)
        endpoint.handle(INVITE, self._on_invite)
        endpoint.on_lost.append(self._on_lost)

    async def close(self) -> None:
        self._is_closed = True
        self._endpoint.unhandle(JOIN)
        self._endpoint.unhandle(INVITE)
        if self._on_lost in self._endpoint.on_lost:
            self._endpoint.on_lost.remove(self._on_lost)
        await self._tasks.close()

    def _on_lost(self, peer_id: PeerId) -> None:
        """A peer whose connection was lost is not waited for, also if it has accepted an invitation."""
        if peer_id in self._roster.expected():
            self._roster.report_missing(peer_id)
            if self._gathering is not None:
                self._gathering.changed.set()

    @contextmanager
    def in_round(self, group: Group) -> Iterator[None]:
        """A round runs within the block. If it commits, this peer is busy until its position has changed."""
        self._busy_at = group.position
        try:
            yield
        except BaseException:
            self._busy_at = None
            raise

    async def find_group(self, weight: float, bandwidth: int, gather_s: float | None = None) -> Group:
        """Wait for the group of the next round at this peer's position.

        Args:
            weight: samples behind this peer's vector.
            bandwidth: bytes per second that this peer can send; 0 when that is not known.
            gather_s: how long to wait for those who are expected, instead of ``matchmaking_time_s``.
        Raises:
            RoundAborted: no group was found; the reason says why.
        """
        addresses = [str(address) for address in self._endpoint.addresses[:MAX_ADDRESSES]]
        is_client = self._endpoint.client_mode
        own = Member(self._endpoint.peer_id, addresses, is_client, weight, 0 if is_client else bandwidth)
        self._gather_s = self._config.matchmaking_time_s if gather_s is None else gather_s
        unreachable: set[PeerId] = set()
        leader: PeerId | None = None
        for _ in range(MAX_REDIRECTS):
            if self._is_closed:
                raise RoundAborted("this peer leaves the run")
            leader = leader or self._invitation() or self._choose_leader(unreachable)
            try:
                response = await (self._lead(own) if leader == own.peer_id else self._follow(leader, own))
            except (Unavailable, PeerError) as error:
                logger.info("peer %s cannot lead this round: %s", leader, error)
                if isinstance(error, Refused) and error.code == BEHIND:
                    raise RoundAborted(f"the run went on without this peer: {error.message}") from error
                if isinstance(error, Unavailable) or (isinstance(error, Refused) and error.code == "busy"):
                    self._roster.report_missing(leader)
                unreachable.add(leader)
                leader = None
                continue
            if response.group is not None:
                return self._checked(response.group, leader, own)
            leader = self._redirected(response, unreachable)
        raise RoundAborted("no leader was found: the peers send this one in circles")

    def _invitation(self) -> PeerId | None:
        """The peer that invited this one to a group, if it should follow; each invitation counts once."""
        inviter, self._inviter = self._inviter, None
        if inviter is None or inviter[1] != self._roster.position() or not self._is_led_by(inviter[0]):
            return None
        return inviter[0]

    def _is_led_by(self, inviter: PeerId) -> bool:
        """Whether this peer should follow who invited it, rather than lead."""
        own_id = self._endpoint.peer_id
        return self._endpoint.client_mode or inviter < own_id or inviter not in self._roster.expected()

    def _choose_leader(self, unreachable: set[PeerId]) -> PeerId:
        expected = self._roster.expected()
        candidates = [peer_id for peer_id, is_client in expected.items() if not is_client]
        if not self._endpoint.client_mode:
            candidates.append(self._endpoint.peer_id)
        candidates = [peer_id for peer_id in candidates if peer_id not in unreachable]
        if candidates:
            return min(candidates)
        if unreachable:
            raise RoundAborted("no peer that could lead a group can be reached from here", sorted(unreachable))
        raise RoundAborted(
            f"all {len(expected) + 1} peers are in client mode, so that nobody can be dialled; "
            "at least one peer must accept connections"
        )

    async def _follow(self, leader: PeerId, own: Member) -> JoinResponse:
        request = JoinRequest(self._run_id, self._run_fingerprint, self._roster.position(), own)
        self._following = leader
        if self._gathering is not None:
            self._gathering.close(self._redirect(leader))
        try:
            timeout_s = self._gather_s + min(self._gather_s, ANSWER_TIMEOUT_S)
            return await self._endpoint.call(leader, JOIN, request, timeout_s)
        finally:
            self._following = None

    def _redirect(self, leader: PeerId) -> JoinResponse:
        addresses = [str(address) for address in self._endpoint.addresses_of(leader)]
        return JoinResponse(leader=leader, leader_addresses=addresses)

    def _redirected(self, response: JoinResponse, unreachable: set[PeerId]) -> PeerId | None:
        if not response.leader or response.leader in unreachable:
            return None
        self._endpoint.learn(response.leader, readable_addresses(response.leader_addresses))
        return response.leader

    def _checked(self, group: Group, leader: PeerId, own: Member) -> Group:
        rank = group.rank_of(own.peer_id)
        ids = {member.peer_id for member in group.members}
        if (
            group.leader != leader
            or leader not in ids
            or group.position != self._roster.position()
            or rank is None
            or group.members[rank] != own
            or len(ids) != len(group.members)
            or all(member.is_client for member in group.members)
        ):
            self._roster.report_missing(leader)
            raise RoundAborted("the leader sent a group that is not for this peer", [leader])
        try:
            allowed_codec(self._config.codec, group.codec)
        except BadEncoding as error:
            self._roster.report_missing(leader)
            raise RoundAborted(f"the leader chose {error}", [leader]) from error
        return group

    # leading

    async def _lead(self, own: Member) -> JoinResponse:
        gathering = self._open_gathering()
        gathering.deadline = min(gathering.deadline, asyncio.get_running_loop().time() + self._gather_s)
        gathering.add(own)
        try:
            return await asyncio.shield(gathering.answer)
        finally:
            gathering.remove(own)

    def _open_gathering(self) -> Gathering:
        position, gathering = self._roster.position(), self._gathering
        if gathering is None or gathering.position != position or gathering.answer.done():
            now = asyncio.get_running_loop().time()
            gathering = self._gathering = Gathering(position, now + self._config.matchmaking_time_s)
            self._tasks.spawn(self._gather(gathering), name="gathering a group")
        return gathering

    async def _gather(self, gathering: Gathering) -> None:
        invitations: dict[PeerId, asyncio.Task[None]] = {}
        try:
            await self._look_around()
            await self._wait_for_all(gathering, invitations)
            if not gathering.answer.done():
                gathering.close(self._outcome(gathering))
        finally:
            for task in invitations.values():
                task.cancel()
            if self._gathering is gathering:
                self._gathering = None
            gathering.close(Refused(self._endpoint.peer_id, "leaving", "this peer leaves the run"))

    async def _look_around(self) -> None:
        """A leader that was called may know less of the others than they do: nobody shall be left out for that."""
        try:
            async with time_limit(LOOK_TIMEOUT_S, "reading who is there"):
                await self._roster.refresh()
        except ManyhandsError as error:
            logger.info("this peer leads with what it knew before: %s", error)

    def _outcome(self, gathering: Gathering) -> JoinResponse | Exception:
        """What to tell those who came: their group, or why there is none."""
        own_id = self._endpoint.peer_id
        if gathering.position != self._roster.position():
            return Refused(own_id, "other_position", "this peer has gone to another position meanwhile")
        late = self._roster.expected().keys() - gathering.joined.keys()
        for peer_id in late:
            self._roster.report_missing(peer_id)
        if own_id not in gathering.joined:
            return Refused(own_id, "busy", "the leader's own training loop did not come to the round")
        if len(gathering.joined) == 1:
            reason = f"none of the {len(late)} expected peers came" if late else "no other peer can be reached"
            return RoundAborted(reason, sorted(late))
        members = [gathering.joined[peer_id] for peer_id in sorted(gathering.joined)]
        return JoinResponse(self._group(gathering.position, members))

    def _group(self, position: Position, members: list[Member]) -> Group:
        own_id, config = self._endpoint.peer_id, self._config
        rtts_s = [self._endpoint.rtt_s(member.peer_id) for member in members if member.peer_id != own_id]
        return Group(
            self._rng.randbytes(16),
            own_id,
            position,
            members,
            min_span_numel=max(1, config.min_span_bytes // FLOAT_BYTES),
            chunk_numel=config.chunk_bytes // FLOAT_BYTES,
            codec=chosen_codec(config.codec, (member.bandwidth for member in members), rtts_s).code,
        )

    async def _wait_for_all(self, gathering: Gathering, invitations: dict[PeerId, asyncio.Task[None]]) -> None:
        loop = asyncio.get_running_loop()
        while not gathering.answer.done() and gathering.position == self._roster.position():
            left_s = gathering.deadline - loop.time()
            expected = self._roster.expected()
            if left_s <= 0 or expected.keys() | {self._endpoint.peer_id} <= gathering.joined.keys():
                return
            self._invite_all(expected, gathering, invitations)
            gathering.changed.clear()
            waiter = loop.create_task(gathering.changed.wait())
            await asyncio.wait([waiter], timeout=min(left_s, ROSTER_POLL_S))
            waiter.cancel()

    def _invite_all(
        self, expected: Mapping[PeerId, bool], gathering: Gathering, invitations: dict[PeerId, asyncio.Task[None]]
    ) -> None:
        """Call the expected peers, so that they need not find out by themselves; and learn who is gone."""
        for peer_id, is_client in expected.items():
            is_reachable = not is_client or self._endpoint.is_connected(peer_id)
            if is_reachable and peer_id not in gathering.joined and peer_id not in invitations:
                request = InviteRequest(self._run_id, gathering.position)
                invitation = self._invite(peer_id, request, gathering)
                invitations[peer_id] = self._tasks.spawn(invitation, name=f"inviting {peer_id}")

    async def _invite(self, peer_id: PeerId, request: InviteRequest, gathering: Gathering) -> None:
        try:
            await self._endpoint.call(peer_id, INVITE, request, self._config.matchmaking_time_s)
        except Unavailable as error:
            logger.info("peer %s does not answer and is not waited for: %s", peer_id, error)
            self._roster.report_missing(peer_id)
        except Refused as error:
            logger.info("peer %s does not come to this round: %s", peer_id, error)
            if error.code == BEHIND:
                gathering.close(Refused(self._endpoint.peer_id, BEHIND, error.message))
        except PeerError as error:
            logger.info("peer %s does not come to this round: %s", peer_id, error)

    # what others ask

    async def _on_invite(self, remote: PeerId, request: InviteRequest) -> InviteResponse:
        await self._catch_up(request.position)
        if request.run_id != self._run_id:
            return InviteResponse()
        self._check_ahead(request.position)
        if request.position == self._roster.position():
            self._inviter = (remote, request.position)
            self._roster.call_to_round()
            if self._gathering is not None and self._is_led_by(remote):
                self._gathering.close(self._redirect(remote))
        return InviteResponse()

    async def _on_join(self, remote: PeerId, request: JoinRequest) -> JoinResponse:
        await self._catch_up(request.position)
        self._check_join(remote, request)
        if self._following is not None:
            return self._redirect(self._following)
        self._endpoint.learn(remote, readable_addresses(request.member.addresses))
        self._roster.call_to_round()
        gathering = self._open_gathering()
        gathering.add(request.member)
        try:
            return await asyncio.shield(gathering.answer)
        finally:
            gathering.remove(request.member)

    async def _catch_up(self, position: Position) -> None:
        """Others may have heard a verdict, or applied it, a moment before this peer: let it come after them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.matchmaking_time_s
        while (here := self._roster.position()).step < position.step:
            if self._busy_at != here or loop.time() > deadline:
                return
            await asyncio.sleep(MOVE_POLL_S)

    def _check_join(self, remote: PeerId, request: JoinRequest) -> None:
        here, there = self._roster.position(), request.position
        me = self._endpoint.peer_id
        if request.run_id != self._run_id:
            raise Refused(me, "other_run", f"this peer trains {self._run_id!r}, not {request.run_id[:80]!r}")
        if request.run_fingerprint != self._run_fingerprint:
            raise Refused(me, "other_manifest", "the model or the settings differ from those of this peer")
        if request.member.peer_id != remote:
            raise Refused(me, "bad_request", "a member joins for itself")
        if self._endpoint.client_mode:
            raise Refused(me, "client_mode", "this peer is in client mode, and leads no group")
        self._check_ahead(there)
        if there != here:
            raise Refused(me, "other_position", f"this peer is at step {here.step}, perhaps of another branch")

    def _check_ahead(self, position: Position) -> None:
        """Tell who is left behind, so that nobody begins a branch of the run without knowing."""
        here = self._roster.position()
        if position.step < here.step:
            me = self._endpoint.peer_id
            raise Refused(me, BEHIND, f"the run is at step {here.step}, not {position.step}")
