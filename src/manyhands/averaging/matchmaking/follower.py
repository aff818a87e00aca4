"""Matchmaking: how peers that are ready for a round form one group.

The leader is the expected peer with the lowest id that can be dialled and whose values are in the state at this
position; without one, the lowest id that can be dialled. A peer that never helped with a step holds up none.
Each ready peer asks the peer that it takes for the leader for a place. A peer that follows another leader answers with
that leader, so different views converge on the first in this order. A leader invites the peers it expects. If a leader
before it in this order invites it, it joins that one with all its followers.
The leader closes the group when all expected peers have asked, or at the matchmaking time with those that have. A peer
that cannot be reached is left out, and is expected again only after a fresh record.

If a peer answers that the run went on, the attempt ends and the training loop looks for the later position. If it finds
none within seconds, that peer is ignored at this position.

In a grid of groups (:mod:`manyhands.averaging.grid.seats`) the position also names the group, and groups finish at
different times. A peer waits for a leader that is still in an earlier round of the same grid. No peer waits for one
that is in a later round.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.matchmaking.admission import (
    BEHIND,
    BUSY,
    FULL,
    OTHER_MANIFEST,
    PAUSED,
    TOLD_BEHIND,
    fault_of,
)
from manyhands.averaging.matchmaking.candidates import Candidates, Roster, short_ids
from manyhands.averaging.matchmaking.handlers import MatchmakingHandlers
from manyhands.averaging.matchmaking.leader import HOLD_S, GroupLeader
from manyhands.averaging.messages import (
    JOIN,
    LEAVE,
    MAX_ADDRESSES,
    MAX_EXPECTED,
    MAX_ROUND_S,
    SHORT_ID_BYTES,
    Group,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    Member,
    Position,
    readable_addresses,
)
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.averaging.timing import DIAL_S, LOOK_S, MOMENT_S
from manyhands.base.errors import PeerError, Refused, RoundAborted, Unavailable
from manyhands.base.identity import PeerId
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = DIAL_S
"""The most that a leader's answer may take beyond its gathering time."""
LET_GO_S = MOMENT_S
"""Timeout of a request to leave. A leader that does not answer may have closed its group with this peer."""
MAX_REDIRECTS = 8
DOUBT_S = 2 * LOOK_S
"""If no connection to the leader exists by then, check which peers can be reached."""
REDIRECT_AGAIN_S = LOOK_S
"""Pause after a redirect to a leader that this peer cannot reach."""
HOLD_AGAIN_S = MOMENT_S
"""Pause after a leader could not give this peer a place."""


class Matchmaker:
    """Finds the group of one run for this peer, as follower or leader.

    Attributes:
        candidates: the peers that could be in the group, and what is known of their conduct.
        on_called_ahead: called when another peer begins to form the group of a future round.
    """

    def __init__(
        self,
        endpoint: RunEndpoint,
        run_fingerprint: bytes,
        roster: Roster,
        config: AveragingConfig,
        rng: random.Random,
    ) -> None:
        self._endpoint = endpoint
        self._run_fingerprint = run_fingerprint
        self._roster = roster
        self._config = config
        self.candidates = Candidates(roster, config.matchmaking_time_s)
        self._tasks = TaskOwner("matchmaking")
        self._group_leader = GroupLeader(endpoint, run_fingerprint, self.candidates, config, rng, self._tasks)
        self._handlers = MatchmakingHandlers(endpoint, run_fingerprint, self.candidates, self._group_leader, config)
        self._gather_s = config.matchmaking_time_s
        self._ends_at = math.inf
        self._is_closed = False
        self._num_refused: Counter[PeerId] = Counter()  # how often each leader refused this peer in the current search
        self._held: tuple[PeerId, Position] | None = None  # the last leader that held a place for this peer
        self.on_called_ahead = self._handlers.on_called_ahead
        endpoint.on_lost.append(self._on_lost)

    async def close(self) -> None:
        self._is_closed = True
        self._handlers.close()
        if self._on_lost in self._endpoint.on_lost:
            self._endpoint.on_lost.remove(self._on_lost)
        await self._tasks.close()

    def _on_lost(self, peer_id: PeerId) -> None:
        """Stop waiting for a peer whose connection broke, even if it accepted an invitation."""
        if peer_id in self._roster.expected():
            self.candidates.report_missing(peer_id)
        if self._endpoint.num_connected_peers == 0:
            self.candidates.forgive()
        self._group_leader.lose(peer_id)

    @contextmanager
    def in_round(self, group: Group) -> Iterator[None]:
        """Mark this peer as in a round. If the round commits, it stays busy until its position changes."""
        self._handlers.busy_at = group.position
        try:
            yield
        except BaseException:
            self._handlers.busy_at = None
            raise

    def follows(self, leader: PeerId) -> bool:
        """Whether this peer waits for a leader's group; false once it follows another leader."""
        return self._handlers.sought_at == math.inf and self._handlers.following == leader

    async def find_group(
        self, weight: float, bandwidth: int, gather_s: float | None = None, timeout_s: float = math.inf
    ) -> Group:
        """Wait for the group of the next round at this peer's position.

        Args:
            bandwidth: this peer's uplink in bytes per second; 0 if unknown.
            gather_s: how long to wait for the expected peers, instead of ``matchmaking_time_s``.
            timeout_s: this peer's time for the round, including this search.
        Raises:
            RoundAborted: no group was found; the reason says why.
        """
        own = self._member(weight, bandwidth)
        self._gather_s = self._config.matchmaking_time_s if gather_s is None else gather_s
        self._ends_at = asyncio.get_running_loop().time() + timeout_s
        self._handlers.sought_at = math.inf
        try:
            return await self._find(own)
        finally:
            self._handlers.sought_at = asyncio.get_running_loop().time()

    def _member(self, weight: float, bandwidth: int) -> Member:
        addresses = [str(address) for address in self._endpoint.addresses[:MAX_ADDRESSES]]
        return Member(self._endpoint.peer_id, addresses, self._endpoint.client_mode, weight, bandwidth)

    async def hold_place(self) -> None:
        """Hold a place in the next group until this is cancelled or the lineage changes.

        When :meth:`find_group` is called, the group then has its leader and connections, and peers that are gone are
        known. The others do not wait for a peer that gives up its place.
        """
        own, lineage = self._member(0.0, 0), self._roster.position().lineage
        leader: PeerId | None = None
        unreachable: set[PeerId] = set()
        while not self._is_closed and self._roster.position().lineage == lineage:
            try:
                if leader is None and (leader := self._handlers.invitation()) in unreachable:
                    leader = None  # a stranger may invite again
                leader = leader or self._choose_leader(unreachable)
                self._held = (leader, self._roster.position())
                response = await self._ask(leader, own, unreachable, is_early=True)
                if response is None or response.leader:
                    leader = None if response is None else await self._redirected(response, unreachable)
            except (Unavailable, PeerError, RoundAborted) as error:
                logger.debug("no place in a group yet: %s", error)  # it is looked for again when the step is due
                leader = None
                await asyncio.sleep(HOLD_AGAIN_S)
                unreachable.clear()

    async def _find(self, own: Member) -> Group:
        unreachable: set[PeerId] = set()
        self._group_leader.shunned = unreachable
        self.candidates.refusals.clear()
        self._num_refused.clear()
        held, self._held = self._held, None
        leader = self._handlers.invitation()
        if held is not None and held[1] == self._roster.position():
            candidates = held[0], leader or held[0]  # the one that held a place, unless a better one has called
            leader = min(candidates, key=self.candidates.rank)
        for _ in range(MAX_REDIRECTS):
            if self._is_closed:
                raise RoundAborted("this peer leaves the run")
            leader = leader or self._handlers.invitation() or self._choose_leader(unreachable)
            response = await self._ask(leader, own, unreachable)
            if response is not None and response.group is not None:
                fault = fault_of(response.group, leader, own, self._roster.position(), self._config.codec)
                if fault is None:
                    return response.group
                self.candidates.report_missing(leader)
                raise RoundAborted(fault, [leader])
            leader = None if response is None else await self._redirected(response, unreachable)
        raise RoundAborted(f"no group found after {MAX_REDIRECTS} redirects")

    async def _ask(
        self, leader: PeerId, own: Member, unreachable: set[PeerId], *, is_early: bool = False
    ) -> JoinResponse | None:
        """Ask a leader for a place, or lead; None if this peer has to go to another leader.

        Raises:
            RoundAborted: no leader can have a group for this peer.
            PeerError: there is no place to hold now.
        """
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        try:
            if leader != own.peer_id:
                return await self._follow(leader, own, unreachable, is_early=is_early)
            if is_early:
                return await self._group_leader.reserve(leader)
            return await self._group_leader.lead(own, self._gather_s, self._ends_at)
        except (Unavailable, PeerError) as error:
            is_gone = isinstance(error, Unavailable)
            if is_early and not is_gone:
                raise  # there may be a place later
            reason = error.message if isinstance(error, Refused) else error  # which names the peer already
            logger.info("peer %s cannot lead this round: %s", leader, reason)
            unreachable.add(leader)
            patience_s = self._config.matchmaking_time_s
            if leader != own.peer_id and not is_early:
                has_waited = self._gather_s >= patience_s <= 2 * (loop.time() - asked_at)
                self._num_refused[leader] += isinstance(error, Refused)
                if has_waited or self._num_refused[leader] > 1:  # it has called this peer again, and refused it again
                    self.candidates.note_unclosed(leader)
            if isinstance(error, Refused):
                self._refused(leader, error)
            elif is_gone:
                self.candidates.report_missing(leader)
                await self._try_the_others(unreachable, leader)
            return None

    def _refused(self, leader: PeerId, refusal: Refused) -> None:
        """Handle a leader's refusal, or why this peer cannot lead.

        Raises:
            RoundAborted: no leader can have a group for this peer.
        """
        if refusal.code == OTHER_MANIFEST:
            self.candidates.note_refusal(leader, refusal)
        elif refusal.code == BUSY:
            self.candidates.report_missing(leader)
        elif refusal.code == FULL and self._roster.position().group_key:  # only groups of a grid are ever full
            raise RoundAborted(refusal.message) from refusal
        elif refusal.code == PAUSED:
            if self.candidates.is_to_blame():
                raise RoundAborted(refusal.message) from refusal
            self.candidates.refusals[leader] = refusal.message  # it may lie: others may lead
        elif refusal.code == BEHIND and leader != self._endpoint.peer_id:
            if self._roster.position().group_key:
                return  # its group is done with this round of the grid; others may not be
            self.candidates.note_ahead(leader)
        if refusal.code in (BEHIND, TOLD_BEHIND):
            raise RoundAborted(f"the run went on without this peer: {refusal.message}") from refusal

    async def _try_the_others(self, unreachable: set[PeerId], leader: PeerId) -> None:
        """After one leader could not be reached, check all other hosts at once, not one by one."""

        async def reach(peer_id: PeerId) -> None:
            try:
                await self._endpoint.ping(peer_id, self._gather_s)
            except Unavailable as error:
                logger.info("peer %s cannot be reached either: %s", peer_id, error)
                self.candidates.report_missing(peer_id)
                unreachable.add(peer_id)
            except PeerError:
                pass  # it answers

        hosts = set(self._group_leader.hosts()) - unreachable - {leader, self._endpoint.peer_id}
        await asyncio.gather(*(reach(peer_id) for peer_id in sorted(hosts) if not self._endpoint.is_connected(peer_id)))

    def _choose_leader(self, unreachable: set[PeerId]) -> PeerId:
        candidates = [peer_id for peer_id in self._group_leader.hosts() if peer_id not in unreachable]
        if candidates:
            return min(candidates, key=self.candidates.rank)
        if unreachable:
            reason = "no peer that could lead a group can be reached from here"
            raise RoundAborted(self.candidates.with_refusals(reason), sorted(unreachable))
        raise RoundAborted(
            f"none of the {len(self.candidates.expected()) + 1} peers can be dialled: all are in client mode; at least "
            "one must accept connections"
        )

    async def _follow(
        self, leader: PeerId, own: Member, unreachable: set[PeerId], *, is_early: bool = False
    ) -> JoinResponse:
        """Ask a leader for a place, unless a better one calls meanwhile."""
        loop = asyncio.get_running_loop()
        expected = self.candidates.expected()
        clients = (peer for peer, is_client in expected.items() if is_client and self._endpoint.is_connected(peer))
        request = JoinRequest(
            self._run_fingerprint,
            self._roster.position(),
            own,
            short_ids(expected)[: SHORT_ID_BYTES * MAX_EXPECTED],
            short_ids(clients)[: SHORT_ID_BYTES * MAX_EXPECTED],
            is_early,
            gather_s=0.0 if is_early else min(self._gather_s, MAX_ROUND_S),
        )
        better = self._handlers.follow(leader)
        self._group_leader.send_to(leader)
        gather_s = HOLD_S if is_early else self._gather_s
        spare_s = math.inf if is_early else max(self._ends_at - loop.time() - gather_s, 0.0)
        timeout_s = gather_s + min(gather_s, ANSWER_TIMEOUT_S, spare_s / 2)  # so that a silent leader is noticed
        asking = loop.create_task(self._endpoint.call(leader, JOIN, request, timeout_s))
        trying = loop.create_task(self._doubt(leader, unreachable))
        try:
            either: list[asyncio.Future[Any]] = [asking, better]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and isinstance(asking.exception(), Unavailable):
                self._handlers.unfollow()  # redirect no more peers there
                await trying
            if not asking.done() and (is_early or await self._may_leave(leader, request.position, asking)):
                unreachable.discard(better.result())  # it has just called
                return JoinResponse(leader=better.result())
            return await asking
        finally:
            asking.cancel()
            trying.cancel()
            await asyncio.gather(asking, trying, return_exceptions=True)
            self._handlers.unfollow()  # last: other peers must not find this peer gone before its round begins

    async def _may_leave(self, leader: PeerId, position: Position, asking: asyncio.Task[JoinResponse]) -> bool:
        """Ask a leader for leave to join a better one; False if the group closed with this peer in it."""
        try:
            response = await self._endpoint.call(leader, LEAVE, LeaveRequest(position), LET_GO_S)
        except (Unavailable, PeerError) as error:
            logger.info("leader %s does not release this peer: %s", leader, error)
        else:
            if response.is_too_late:
                await asyncio.wait([asking], timeout=LET_GO_S)
        return not asking.done() or asking.exception() is not None or asking.result().group is None

    async def _doubt(self, leader: PeerId, unreachable: set[PeerId]) -> None:
        await asyncio.sleep(DOUBT_S)
        if not self._endpoint.is_connected(leader):
            await self._try_the_others(unreachable, leader)

    async def _redirected(self, response: JoinResponse, unreachable: set[PeerId]) -> PeerId | None:
        if not response.leader:
            return None
        if response.leader in unreachable:  # the redirecting peer soon finds this out, too
            await asyncio.sleep(REDIRECT_AGAIN_S)
            return None
        self._endpoint.learn(response.leader, readable_addresses(response.leader_addresses))
        return response.leader
