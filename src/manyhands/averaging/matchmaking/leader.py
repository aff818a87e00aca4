"""The leader's side of matchmaking: gathers the peers that come, invites the others, and closes the group."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.matchmaking.admission import (
    AVOIDED,
    BEHIND,
    BUSY,
    FULL,
    OTHER_MANIFEST,
    TOLD_BEHIND,
    chosen_codec,
)
from manyhands.averaging.matchmaking.candidates import Candidates, split_ids
from manyhands.averaging.messages import (
    INVITE,
    MAX_ROUND_S,
    NAME_BYTES,
    Group,
    InviteRequest,
    InviteResponse,
    JoinRequest,
    JoinResponse,
    Member,
    Position,
    readable_addresses,
    short_id,
)
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.averaging.timing import ANSWER_S, DIAL_S, LOOK_S, MOMENT_S
from manyhands.base.deadline import time_limit, wait_at_most
from manyhands.base.errors import ManyhandsError, NobodyThere, PeerError, Refused, RoundAborted, Unavailable
from manyhands.base.identity import PeerId
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

ROSTER_POLL_S = LOOK_S
ASK_AGAIN_S = MOMENT_S
LOOK_TIMEOUT_S = MOMENT_S
LOOK_FOR_NEWCOMER_S = 2 * LOOK_S
"""Seconds between two reads of the DHT for records of unknown peers; their requests wait for it."""
HEARSAY_S = ANSWER_S
"""How long to wait for a peer that only a member knows, until this peer reads its record."""
CLIENT_S = DIAL_S
"""How long to wait for a client that is not connected to any peer here: the time of a dial."""
HOLD_S = 2 * DIAL_S
"""A peer that holds a place asks for it again after this time."""
HELD_S = MOMENT_S
"""Its place is then kept for this long."""
LEADER_S = MOMENT_S
"""The least time that a leader's own training loop has to come, however impatient the followers are."""
FLOAT_BYTES = 4


class PendingGroup:
    """A group that is still forming, at its leader. All times are those of the loop.

    Attributes:
        reserved: peers that hold places until their values are there, and until when.
        absent: peers that said last that they are at a later round of the grid.
        elsewhere: peers that said last that they avoid this one, or follow a leader that this one avoids.
        due_since: when the first trusted member had its values; infinite before that.
        deadline: when the group closes with the members it has; infinite until a trusted member has its values.
        leader_due: how long the most patient member waits for the leader itself; None if there is none.
        ends_at: end of the leader's time for the round.
        seen: clients that are connected to a member, by short id.
        hearsay: peers that only members know yet, by short id, and until when they are waited for.
        ask_again_at: when an expected peer is invited again: it may have joined another group since it was asked.
        answer: to all waiting members, once the group closes.
    """

    def __init__(self, position: Position) -> None:
        loop = asyncio.get_running_loop()
        self.position = position
        self.began = loop.time()
        self.due_since = self.deadline = self.ends_at = math.inf
        self.leader_due: float | None = None
        self.joined: dict[PeerId, Member] = {}
        self.reserved: dict[PeerId, float] = {}
        self.absent: set[PeerId] = set()
        self.elsewhere: set[PeerId] = set()
        self.seen: set[bytes] = set()
        self.hearsay: dict[bytes, float] = {}
        self.ask_again_at: dict[PeerId, float] = {}
        self.changed = asyncio.Event()
        self.answer: asyncio.Future[JoinResponse] = loop.create_future()
        self.answer.add_done_callback(lambda answer: answer.exception())  # waiting members get it, if any

    async def wait_with(self, member: Member) -> JoinResponse:
        """Give a peer its place, and wait for the outcome; raises why there is no group here."""
        self.joined[member.peer_id] = member
        self.changed.set()
        try:
            return await asyncio.shield(self.answer)
        finally:
            if not self.answer.done() and self.joined.get(member.peer_id) is member:  # it has not asked again
                self._let_out(member.peer_id)

    def _let_out(self, peer_id: PeerId) -> None:
        del self.joined[peer_id]
        self.ask_again_at.pop(peer_id, None)
        self.changed.set()

    def let_go(self, peer_id: PeerId) -> bool:
        """Release a member's place; False if the group has closed with it."""
        if self.answer.done():
            return peer_id not in self.joined
        if peer_id in self.joined:
            self._let_out(peer_id)  # it is invited again, and its answer names its leader
        return True

    def begin(self, deadline: float) -> None:
        """The values of a trusted member are there: set the deadline, and call the peers that hold places."""
        if self.deadline == math.inf:
            self.deadline, self.due_since = deadline, asyncio.get_running_loop().time()
            self.leader_due = None  # however patient those are that came too early
            self.ask_again_at.clear()

    def left_s(self, leader: PeerId) -> float:
        """Seconds until the group must close."""
        until = self.deadline
        if leader not in self.joined and self.leader_due is not None:
            until = min(until, self.leader_due)
        return until - asyncio.get_running_loop().time()

    def have_places(self, now: float) -> set[PeerId]:
        """Peers that have come or still hold a place."""
        return self.joined.keys() | {peer_id for peer_id, until in self.reserved.items() if until > now}

    def forget_hearsay(self, known: Collection[PeerId]) -> None:
        """Stop waiting for peers that this one knows by now, or has waited for long enough."""
        if self.hearsay:
            known_ids, now = set(map(short_id, known)), asyncio.get_running_loop().time()
            self.hearsay = {one: until for one, until in self.hearsay.items() if until > now and one not in known_ids}

    def close(self, answer: JoinResponse | Exception) -> None:
        """Answer all waiting members; only the first answer counts."""
        if self.answer.done():
            return
        if isinstance(answer, JoinResponse):
            self.answer.set_result(answer)
        else:
            self.answer.set_exception(answer)
        self.changed.set()


@dataclass(eq=False)
class GroupLeader:
    """Gathers one group at a time.

    Attributes:
        pending: the group that forms here, if any.
        shunned: peers that could not be reached as leaders, whatever others say.
    """

    endpoint: RunEndpoint
    run_fingerprint: bytes
    candidates: Candidates
    config: AveragingConfig
    rng: random.Random
    tasks: TaskOwner
    pending: PendingGroup | None = None
    shunned: Collection[PeerId] = ()
    _former: PendingGroup | None = None
    _called: tuple[Position, float] | None = None  # where others wait for this peer, and since when
    _looked_again_at: float = -math.inf  # loop time
    _looking: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._roster = self.candidates.roster

    def hosts(self) -> list[PeerId]:
        """This peer and the expected ones, as far as they can be dialled."""
        own_ids = [] if self.endpoint.client_mode else [self.endpoint.peer_id]
        return own_ids + [peer_id for peer_id, is_client in self.candidates.expected().items() if not is_client]

    def is_trusted(self, peer_id: PeerId) -> bool:
        """Whether a peer's values are in the state here, or those of no peer that could lead."""
        contributors = self._roster.contributors()
        return peer_id in contributors or not any(host in contributors for host in self.hosts())

    async def lead(self, own: Member, gather_s: float, ends_at: float) -> JoinResponse:
        """Join the group that forms here as its leader; wait for the outcome.

        Args:
            gather_s: how long to wait for the expected peers.
            ends_at: end of this peer's time for the round (loop time).
        """
        self._called = None
        pending, now = self.open(), asyncio.get_running_loop().time()
        pending.begin(now + self.config.matchmaking_time_s)
        pending.deadline = min(pending.deadline, now + gather_s)
        pending.ends_at = ends_at
        return await pending.wait_with(own)

    async def take_in(self, request: JoinRequest) -> JoinResponse:
        """Give another peer a place; wait for the outcome."""
        now, member, position = asyncio.get_running_loop().time(), request.member, self._roster.position()
        due, pending, is_trusted = math.inf, self.pending, self.is_trusted(member.peer_id)
        if pending is None or self.endpoint.peer_id not in pending.joined:  # this peer has not come itself
            called = self._called if self._called is not None and self._called[0] == position else (position, now)
            if is_trusted:  # all count from its first call: equally patient peers leave together
                self._called = called
            due = called[1] + min(max(LEADER_S, request.gather_s or math.inf), self.config.matchmaking_time_s)
        if now >= due:
            raise self._not_here()
        pending = self.open()
        if member.peer_id not in pending.joined and self._is_full(pending):
            size = self.config.max_group_size
            raise Refused(self.endpoint.peer_id, FULL, f"the group has its {size} members; try the next round")
        if is_trusted:
            pending.begin(now + self.config.matchmaking_time_s)
        if is_trusted or pending.deadline == math.inf:
            pending.leader_due = max(due, pending.leader_due or due)
        self._note_hearsay(pending, request.expects)
        pending.seen |= split_ids(request.clients)
        return await pending.wait_with(member)

    def _not_here(self) -> Refused:
        return Refused(self.endpoint.peer_id, BUSY, "the leader's own training loop did not come to the round")

    async def reserve(self, peer_id: PeerId, expects: bytes = b"") -> JoinResponse:
        """Hold a place for a peer, possibly this one, until the group closes or it has to ask again."""
        pending = self.open()
        self._note_hearsay(pending, expects)
        pending.reserved[peer_id] = math.inf
        pending.changed.set()
        try:
            await asyncio.wait([pending.answer], timeout=HOLD_S)
            end = pending.answer.result() if pending.answer.done() else JoinResponse()
            return JoinResponse(leader=end.leader, leader_addresses=end.leader_addresses)
        finally:  # it asks again or comes at once, unless it has given its round up
            pending.reserved[peer_id] = asyncio.get_running_loop().time() + HELD_S
            if peer_id != self.endpoint.peer_id and not self.endpoint.is_connected(peer_id):
                self.lose(peer_id)

    def lose(self, peer_id: PeerId) -> None:
        """Free the place of a peer whose connection broke."""
        if self.pending is not None:
            self.pending.reserved.pop(peer_id, None)
            self.pending.changed.set()

    def let_go(self, peer_id: PeerId, position: Position) -> bool:
        """Release a peer to another leader; False if it is a member of a closed group."""
        pending = self.pending or self._former
        return pending is None or pending.position != position or pending.let_go(peer_id)

    def _note_hearsay(self, pending: PendingGroup, expects: bytes) -> None:
        until = asyncio.get_running_loop().time() + HEARSAY_S
        for stranger in self.candidates.unheard_of(expects, self.endpoint.peer_id):
            pending.hearsay[stranger] = until

    def send_to(self, leader: PeerId) -> None:
        """Redirect the peers that have come here to another leader."""
        if self.pending is not None:
            self.pending.close(self.redirect(leader))

    def redirect(self, leader: PeerId) -> JoinResponse:
        addresses = [str(address) for address in self.endpoint.addresses_to_tell(leader)]
        return JoinResponse(leader=leader, leader_addresses=addresses)

    def open(self) -> PendingGroup:
        position, pending = self._roster.position(), self.pending
        if pending is None or pending.position != position or pending.answer.done():
            pending = self.pending = PendingGroup(position)
            self.tasks.spawn(self._gather(pending), name="gathering a group")
        return pending

    async def _gather(self, pending: PendingGroup) -> None:
        invitations: dict[PeerId, asyncio.Task[None]] = {}
        try:
            await self._look_around()
            await self._wait_for_all(pending, invitations)
            if not pending.answer.done():
                pending.close(self._outcome(pending))
        finally:
            for task in invitations.values():
                task.cancel()
            if self.pending is pending:
                self.pending, self._former = None, pending
            pending.close(Refused(self.endpoint.peer_id, "leaving", "this peer leaves the run"))

    async def _look_around(self) -> None:
        """Read the records of all peers, so that an invited leader does not leave out a peer that others know."""
        try:
            async with time_limit(LOOK_TIMEOUT_S, "reading the records of all peers"):
                await self._roster.refresh()
        except ManyhandsError as error:
            logger.info("cannot read the records, so this peer leads with those that it has: %s", error)

    async def look_again(self) -> None:
        """Like :meth:`_look_around`, but rate-limited: all that ask meanwhile wait for one look."""
        if self._looking is None:
            left_s = self._looked_again_at + LOOK_FOR_NEWCOMER_S - asyncio.get_running_loop().time()
            self._looking = self.tasks.spawn(self._look_when_due(left_s), name="looking who asks")
        await asyncio.wait([self._looking])

    async def _look_when_due(self, left_s: float) -> None:
        try:
            await asyncio.sleep(max(left_s, 0.0))
            self._looked_again_at = asyncio.get_running_loop().time()
            await self._look_around()
        finally:
            self._looking = None

    def _outcome(self, pending: PendingGroup) -> JoinResponse | Exception:
        """The answer to the peers that came: their group, or why there is none."""
        own_id = self.endpoint.peer_id
        if pending.position != self._roster.position():
            return Refused(own_id, "other_position", "this peer has gone to another position meanwhile")
        if pending.deadline == math.inf and not pending.joined:
            return RoundAborted("all peers that held places have gone")
        if own_id not in pending.joined:
            return self._not_here()
        late = self.candidates.expected().keys() - pending.joined.keys() - pending.absent - pending.elsewhere
        for peer_id in late:
            self.candidates.report_missing(peer_id)
        if self._is_late(pending):
            self.candidates.note_in_vain(late | (self._with_places(pending) - pending.joined.keys()))
        if len(pending.joined) == 1:
            if pending.elsewhere and not late:
                return Refused(own_id, AVOIDED, "the others avoid this peer, or follow a leader that this one avoids")
            if not late:
                return NobodyThere(self.candidates.with_refusals("no other peer can be reached"))
            reason = (
                f"none of the {len(late)} expected peers came" if len(late) > 1 else "the expected peer did not come"
            )
            return RoundAborted(self.candidates.with_refusals(reason), sorted(late))
        members = [pending.joined[peer_id] for peer_id in sorted(pending.joined)]
        return JoinResponse(self._group(pending, members))

    def _is_late(self, pending: PendingGroup) -> bool:
        """Whether the members have waited so long that it counts against the peers that do not come."""
        return asyncio.get_running_loop().time() - pending.due_since >= self.config.matchmaking_time_s / 2

    def _group(self, pending: PendingGroup, members: list[Member]) -> Group:
        own_id, config = self.endpoint.peer_id, self.config
        rtts_s = [self.endpoint.rtt_s(member.peer_id) for member in members if member.peer_id != own_id]
        left_s = pending.ends_at - asyncio.get_running_loop().time()
        return Group(
            self.rng.randbytes(NAME_BYTES),
            own_id,
            pending.position,
            members,
            min_span_numel=max(1, config.min_span_bytes // FLOAT_BYTES),
            chunk_numel=config.chunk_bytes // FLOAT_BYTES,
            codec=chosen_codec(config.codec, (member.bandwidth for member in members), rtts_s).code,
            time_left_s=max(left_s, 0.0) if left_s <= MAX_ROUND_S else 0.0,
        )

    async def _wait_for_all(self, pending: PendingGroup, invitations: dict[PeerId, asyncio.Task[None]]) -> None:
        while not pending.answer.done() and pending.position == self._roster.position():
            own_id = self.endpoint.peer_id
            left_s = pending.left_s(own_id)
            expected = self._without_lost_clients(pending)
            have_places = self._with_places(pending)
            pending.forget_hearsay(expected.keys() | have_places)
            awaited = expected.keys() - pending.absent - pending.elsewhere | have_places | {own_id}
            are_all_here = awaited <= pending.joined.keys() and not pending.hearsay
            is_full = own_id in pending.joined and self._is_full(pending)
            if left_s <= 0 or are_all_here or is_full or (left_s == math.inf and not have_places):
                return
            self._invite_all(expected, pending, invitations)
            pending.changed.clear()
            await wait_at_most(pending.changed, min(left_s, ROSTER_POLL_S))

    def _with_places(self, pending: PendingGroup) -> set[PeerId]:
        """The peers that have come, and those with places that are still waited for."""
        have_places, own_id = pending.have_places(asyncio.get_running_loop().time()), self.endpoint.peer_id
        heeded = {peer_id for peer_id in have_places if peer_id == own_id or self.candidates.is_heeded(peer_id)}
        return pending.joined.keys() | heeded

    def _without_lost_clients(self, pending: PendingGroup) -> Mapping[PeerId, bool]:
        """The expected peers, without clients that no peer here is connected to."""
        expected = self.candidates.expected()
        if asyncio.get_running_loop().time() < pending.began + CLIENT_S:
            return expected
        lost = [
            peer_id
            for peer_id, is_client in expected.items()
            if is_client
            and peer_id not in pending.joined
            and short_id(peer_id) not in pending.seen
            and not self.endpoint.is_connected(peer_id)
        ]
        for peer_id in lost:
            logger.info("peer %s is in client mode, is connected to nobody here, and is not waited for", peer_id)
            self.candidates.report_missing(peer_id)
        return self.candidates.expected() if lost else expected

    def _is_full(self, pending: PendingGroup) -> bool:
        """Whether a group of a grid has no place left; the last one is reserved for this peer."""
        num_places = self.config.max_group_size - (self.endpoint.peer_id not in pending.joined)
        return bool(pending.position.group_key) and len(pending.joined) >= num_places

    def _invite_all(
        self, expected: Mapping[PeerId, bool], pending: PendingGroup, invitations: dict[PeerId, asyncio.Task[None]]
    ) -> None:
        """Invite the expected peers, which also shows which of them are gone."""
        now, is_early = asyncio.get_running_loop().time(), pending.deadline == math.inf
        have_come = pending.have_places(now) if is_early else pending.joined.keys()
        for peer_id, is_client in expected.items():
            is_reachable = not is_client or self.endpoint.is_connected(peer_id)
            if not is_reachable or peer_id in have_come or now < pending.ask_again_at.get(peer_id, now):
                continue
            pending.ask_again_at[peer_id] = now + ASK_AGAIN_S
            if peer_id in invitations and not invitations[peer_id].done():
                continue
            request = InviteRequest(pending.position, self.run_fingerprint, is_early)
            invitation = self._invite(peer_id, request, pending)
            invitations[peer_id] = self.tasks.spawn(invitation, name=f"inviting {peer_id}")

    async def _invite(self, peer_id: PeerId, request: InviteRequest, pending: PendingGroup) -> None:
        try:
            response = await self.endpoint.call(peer_id, INVITE, request, self.config.matchmaking_time_s)
        except Unavailable as error:
            logger.info("peer %s does not answer and is not waited for: %s", peer_id, error)
            self.candidates.report_missing(peer_id)
            pending.ask_again_at.pop(peer_id, None)  # it is asked as soon as it is expected again
        except Refused as error:
            logger.info("peer %s does not come to this round: %s", peer_id, error.message)
            self._refused(peer_id, error, pending)
        except PeerError as error:
            logger.info("peer %s does not come to this round: %s", peer_id, error)
        else:
            self._heard(peer_id, response, pending)
        pending.changed.set()

    def _refused(self, peer_id: PeerId, refusal: Refused, pending: PendingGroup) -> None:
        if refusal.code == OTHER_MANIFEST:
            self.candidates.note_refusal(peer_id, refusal)
        elif refusal.code == AVOIDED:
            self._does_not_come(peer_id, pending)
        elif refusal.code == BEHIND and pending.position.group_key:
            pending.absent.add(peer_id)  # its group is done with this round of the grid; others may not be
        elif refusal.code == BEHIND and peer_id in self.candidates.expected():
            self.candidates.note_ahead(peer_id)
            pending.close(Refused(self.endpoint.peer_id, TOLD_BEHIND, refusal.message))

    def _heard(self, peer_id: PeerId, response: InviteResponse, pending: PendingGroup) -> None:
        """Handle an invited peer's answer: it comes, or names the leader it follows."""
        leader, rank = response.leader, self.candidates.rank
        if not leader or rank(leader) >= rank(self.endpoint.peer_id) or leader in self.shunned:
            pending.absent.discard(peer_id)
            pending.elsewhere.discard(peer_id)
        elif self.candidates.is_heeded(leader):
            self.endpoint.learn(leader, readable_addresses(response.leader_addresses))
            pending.close(self.redirect(leader))
        else:
            self._does_not_come(peer_id, pending)

    def _does_not_come(self, peer_id: PeerId, pending: PendingGroup) -> None:
        """Do not wait for a peer that avoids this one, or follows a leader that this one avoids."""
        if peer_id not in pending.elsewhere and self._is_late(pending):
            self.candidates.note_in_vain([peer_id])
        pending.elsewhere.add(peer_id)
