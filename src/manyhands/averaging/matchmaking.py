"""How the peers that are ready for a round find each other.

The leader is the lowest peer id among those who are expected and can be dialled. Everybody who is ready asks the leader
it believes in for a place; a peer that itself follows another leader answers with that one, so different views settle
on the lowest. The leader closes the group as soon as all expected peers have asked, or at the matchmaking time with
who came. Whoever cannot be reached is left out of this round, and not expected again before a fresh record of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from typing import Protocol

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import (
    INVITE,
    JOIN,
    Group,
    InviteRequest,
    InviteResponse,
    JoinRequest,
    JoinResponse,
    Member,
    Position,
)
from manyhands.base.address import Address, parse_addresses
from manyhands.base.errors import ConfigError, ManyhandsError, PeerError, Refused, RoundAborted, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

ROSTER_POLL_S = 0.2
MAX_REDIRECTS = 8


class Roster(Protocol):
    """What matchmaking needs to know of the run."""

    def position(self) -> Position:
        """Where this peer stands."""

    def expected(self) -> Mapping[PeerId, bool]:
        """The other peers at this position that should come to the next round, and whether each is in client mode."""

    def report_missing(self, peer_id: PeerId) -> None:
        """A peer did not come; it is not expected again before a fresh record of it."""

    def call_to_round(self) -> None:
        """Another peer has begun a round at this position; the training loop should come as soon as it can."""


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

    def remove(self, peer_id: PeerId) -> None:
        if not self.answer.done():
            self.joined.pop(peer_id, None)
            self.changed.set()


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
        self._tasks = TaskOwner("matchmaking")
        endpoint.handle(JOIN, self._on_join)
        endpoint.handle(INVITE, self._on_invite)

    async def close(self) -> None:
        self._endpoint.unhandle(JOIN)
        self._endpoint.unhandle(INVITE)
        await self._tasks.close()

    async def find_group(self, weight: float) -> Group:
        """Wait for the group of the next round at this peer's position.

        Args:
            weight: samples behind this peer's vector.
        Raises:
            RoundAborted: no group was found; the reason says why.
        """
        addresses = [str(address) for address in self._endpoint.addresses]
        own = Member(self._endpoint.peer_id, addresses, self._endpoint.client_mode, weight)
        unreachable: set[PeerId] = set()
        leader: PeerId | None = None
        for _ in range(MAX_REDIRECTS):
            leader = leader or self._choose_leader(unreachable)
            try:
                response = await (self._lead(own) if leader == own.peer_id else self._follow(leader, own))
            except (Unavailable, PeerError) as error:
                logger.info("peer %s cannot lead this round: %s", leader, error)
                if isinstance(error, Refused) and error.code == "behind":
                    raise RoundAborted(f"the run went on without this peer: {error.message}") from error
                if isinstance(error, Unavailable):
                    self._roster.report_missing(leader)
                unreachable.add(leader)
                leader = None
                continue
            if response.group is not None:
                return self._checked(response.group, leader, own)
            leader = self._redirected(response, unreachable)
        raise RoundAborted("no leader was found: the peers send this one in circles")

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
        if self._gathering is not None and not self._gathering.answer.done():
            self._gathering.answer.set_result(self._redirect())
        try:
            return await self._endpoint.call(leader, JOIN, request, self._config.matchmaking_time_s + 5.0)
        finally:
            self._following = None

    def _redirect(self) -> JoinResponse:
        assert self._following is not None
        addresses = [str(address) for address in self._endpoint.addresses_of(self._following)]
        return JoinResponse(leader=self._following, leader_addresses=addresses)

    def _redirected(self, response: JoinResponse, unreachable: set[PeerId]) -> PeerId | None:
        if not response.leader or response.leader in unreachable:
            return None
        self._endpoint.learn(response.leader, _readable(response.leader_addresses))
        return response.leader

    def _checked(self, group: Group, leader: PeerId, own: Member) -> Group:
        rank = group.rank_of(own.peer_id)
        ids = {member.peer_id for member in group.members}
        if (
            group.leader != leader
            or group.position != self._roster.position()
            or rank is None
            or group.members[rank].weight != own.weight
            or len(ids) != len(group.members)
        ):
            raise RoundAborted("the leader sent a group that is not for this peer", [leader])
        for member in group.members:
            self._endpoint.learn(member.peer_id, _readable(member.addresses))
        return group

    # leading

    async def _lead(self, own: Member) -> JoinResponse:
        gathering = self._open_gathering()
        gathering.add(own)
        try:
            return await asyncio.shield(gathering.answer)
        finally:
            gathering.remove(own.peer_id)

    def _open_gathering(self) -> Gathering:
        position = self._roster.position()
        if self._gathering is None or self._gathering.position != position:
            now = asyncio.get_running_loop().time()
            self._gathering = Gathering(position, now + self._config.matchmaking_time_s)
            self._tasks.spawn(self._gather(self._gathering), name="gathering a group")
        return self._gathering

    async def _gather(self, gathering: Gathering) -> None:
        invitations = self._tasks.spawn(self._invite_all(), name="inviting")
        try:
            await self._wait_for_all(gathering)
        finally:
            invitations.cancel()
            if self._gathering is gathering:
                self._gathering = None
        if not gathering.answer.done():
            self._close(gathering)

    def _close(self, gathering: Gathering) -> None:
        late = self._roster.expected().keys() - gathering.joined.keys()
        for peer_id in late:
            self._roster.report_missing(peer_id)
        if self._endpoint.peer_id not in gathering.joined:
            gathering.answer.set_exception(
                Refused(self._endpoint.peer_id, "busy", "the leader's own training loop did not come to the round")
            )
        elif len(gathering.joined) == 1:
            reason = f"none of the {len(late)} expected peers came" if late else "no other peer can be reached"
            gathering.answer.set_exception(RoundAborted(reason, sorted(late)))
        else:
            members = [gathering.joined[peer_id] for peer_id in sorted(gathering.joined)]
            group_id = self._rng.randbytes(16)
            group = Group(group_id, self._endpoint.peer_id, gathering.position, members)
            gathering.answer.set_result(JoinResponse(group))

    async def _wait_for_all(self, gathering: Gathering) -> None:
        loop = asyncio.get_running_loop()
        while not gathering.answer.done() and (left_s := gathering.deadline - loop.time()) > 0:
            awaited = self._roster.expected().keys() | {self._endpoint.peer_id}
            if awaited <= gathering.joined.keys():
                return
            gathering.changed.clear()
            waiter = loop.create_task(gathering.changed.wait())
            await asyncio.wait([waiter], timeout=min(left_s, ROSTER_POLL_S))
            waiter.cancel()

    async def _invite_all(self) -> None:
        """Call the expected peers, so that they need not find out by themselves; and learn who is gone."""
        request = InviteRequest(self._run_id, self._roster.position())
        expected = self._roster.expected()
        reachable = [peer_id for peer_id in expected if not expected[peer_id] or self._endpoint.is_connected(peer_id)]
        await asyncio.gather(*(self._invite(peer_id, request) for peer_id in reachable))

    async def _invite(self, peer_id: PeerId, request: InviteRequest) -> None:
        try:
            await self._endpoint.call(peer_id, INVITE, request, self._config.matchmaking_time_s)
        except Unavailable as error:
            logger.info("peer %s does not answer and is not waited for: %s", peer_id, error)
            self._roster.report_missing(peer_id)
        except ManyhandsError as error:
            logger.info("peer %s does not come to this round: %s", peer_id, error)

    # what others ask

    async def _on_invite(self, remote: PeerId, request: InviteRequest) -> InviteResponse:
        if request.run_id == self._run_id and request.position == self._roster.position():
            self._roster.call_to_round()
        return InviteResponse()

    async def _on_join(self, remote: PeerId, request: JoinRequest) -> JoinResponse:
        self._check_join(remote, request)
        if self._following is not None:
            return self._redirect()
        self._endpoint.learn(remote, _readable(request.member.addresses))
        self._roster.call_to_round()
        gathering = self._open_gathering()
        gathering.add(request.member)
        try:
            return await asyncio.shield(gathering.answer)
        finally:
            gathering.remove(remote)

    def _check_join(self, remote: PeerId, request: JoinRequest) -> None:
        here, there = self._roster.position(), request.position
        me = self._endpoint.peer_id
        if request.run_id != self._run_id:
            raise Refused(me, "other_run", f"this peer trains {self._run_id!r}, not {request.run_id[:80]!r}")
        if request.run_fingerprint != self._run_fingerprint:
            raise Refused(me, "other_manifest", "the model or the settings differ from those of this peer")
        if request.member.peer_id != remote or not 0 <= request.member.weight < float("inf"):
            raise Refused(me, "bad_request", "a member joins for itself, with a weight that is finite and >= 0")
        if there.step < here.step:
            raise Refused(me, "behind", f"the run is at step {here.step}, not {there.step}")
        if there != here:
            raise Refused(me, "other_position", f"this peer is at step {here.step}, perhaps of another branch")


def _readable(texts: list[str]) -> list[Address]:
    """The addresses that can be read; a newer version may send others."""
    readable: list[Address] = []
    for text in texts[:8]:
        try:
            readable += parse_addresses([text])
        except ConfigError:
            continue
    return readable
