"""Carries out what :mod:`.matchmaking_machine` decides: it calls other peers, and answers their calls.

It decides nothing itself.

::

    any peer                                      the leader
    --------                                      ----------
    JOIN, once its step is due ──────────────────>  answered when the group closes
                       <── the group, or the leader that the asked peer follows itself
                       <── CALL, if it does not come  "a round has begun"
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from manyhands.averaging.attendees import Attendees
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.matchmaking import matchmaking_machine
from manyhands.averaging.matchmaking.admission import (
    Ways,
    check_call,
    check_join,
    chosen_codec,
    clients_to_meet,
    fault_of,
    is_later_round,
    met_clients,
)
from manyhands.averaging.matchmaking.matchmaking_machine import Action, Event, Matchmaking, Stage
from manyhands.averaging.matchmaking.patience import ask_s
from manyhands.averaging.messages import (
    CALL,
    JOIN,
    MAX_CLIENTS_MET,
    NAME_BYTES,
    CallRequest,
    CallResponse,
    Group,
    JoinRequest,
    JoinResponse,
    Member,
    Position,
    readable_addresses,
)
from manyhands.averaging.roster import Roster
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.averaging.timing import ANSWER_S, DAY_S, DIAL_S, LOOK_S, MOMENT_S, SOON_S, TWO_ANSWERS_S
from manyhands.base.address import MAX_ADDRESSES
from manyhands.base.deadline import wait_at_most
from manyhands.base.errors import NobodyThere, PeerError, Refused, RoundAborted, Timeout, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc.ways import PUNCHED
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

GREETED_AT_ONCE = 4
"""Other clients to which a client connects at a time."""


class Meeting(Protocol):
    """Knows where and with whom this peer averages next; the optimizer and the averager implement it."""

    def position(self) -> Position:
        """The position of the attendees; cheaper than :meth:`attendees`."""

    def attendees(self) -> Attendees:
        """The peers that should come to the next round, as far as known now."""

    def report_missing(self, peer_id: PeerId) -> None:
        """A peer did not come; it is expected again only after a fresh record."""

    def call_to_round(self) -> None:
        """Another peer has begun a round at this position; the training loop should come as soon as it can."""


class Matchmaker:
    """Finds the groups of one run for this peer."""

    def __init__(
        self,
        endpoint: RunEndpoint,
        run_fingerprint: bytes,
        meeting: Meeting,
        config: AveragingConfig,
        rng: random.Random,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._run_fingerprint = run_fingerprint
        self._meeting = meeting
        self._config = config
        self._rng = rng
        self._machine = Matchmaking(endpoint.peer_id, self._loop.time(), config.max_group_size)
        self._tasks = TaskOwner("matchmaking")
        self._found: asyncio.Future[Group] | None = None
        self._own: Member | None = None
        self._asking: asyncio.Task[None] | None = None
        self._waiting: dict[PeerId, asyncio.Future[JoinResponse]] = {}  # the answers to peers that asked here
        self._ways: dict[PeerId, Ways] = {}  # of clients that asked here, to other clients
        self._reaching: set[PeerId] = set()
        self._greeting: asyncio.Task[None] | None = None
        self._was_in_group = False
        self._looking: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._ended_at = -math.inf  # loop time when the last search ended
        endpoint.handle(JOIN, self._on_join)
        endpoint.handle(CALL, self._on_call)
        endpoint.on_lost.append(self._on_lost)

    async def close(self) -> None:
        """End this peer's search, and refuse all peers that have asked here."""
        self._endpoint.unhandle(JOIN)
        self._endpoint.unhandle(CALL)
        if self._on_lost in self._endpoint.on_lost:
            self._endpoint.on_lost.remove(self._on_lost)
        if self._found is not None and not self._found.done():
            self._found.set_exception(RoundAborted("this peer leaves the run"))
        refusal = Refused(self._endpoint.peer_id, "leaving", "this peer leaves the run")
        for answer in self._waiting.values():
            _end(answer, refusal)
        await self._tasks.close()

    async def find_group(
        self,
        weight: float,
        bandwidth: int,
        gather_s: float | None = None,
        *,
        may_reduce: bool = True,
        norm: float = 0.0,
    ) -> Group:
        """Wait for the group of the next round at this peer's position.

        Args:
            bandwidth: this peer's uplink in bytes per second; 0 if unknown.
            gather_s: how long to wait for the others, instead of ``matchmaking_time_s``.
            may_reduce: whether this peer should own a span.
            norm: of this peer's values, where the round clips.
        Raises:
            RoundAborted: no group was found; the reason says why.
        """
        if self._tasks.is_closed:
            raise RoundAborted("this peer leaves the run")
        addresses = [str(address) for address in self._endpoint.addresses[:MAX_ADDRESSES]]
        self._own = Member(
            self._endpoint.peer_id,
            addresses,
            self._endpoint.client_mode,
            float(weight),
            bandwidth,
            may_reduce,
            is_punchable=self._endpoint.client_mode and self._endpoint.outside.is_known,
            norm=norm,
        )
        found: asyncio.Future[Group] = self._loop.create_future()
        self._found = found
        is_broken_off = True
        try:
            patience_s = self._config.matchmaking_time_s if gather_s is None else gather_s
            self._on(matchmaking_machine.Due(self._own, patience_s))
            group = await found
            is_broken_off = False
            return group
        finally:
            self._found = None
            self._ended_at = self._loop.time()
            if not found.done() or found.cancelled():
                self._on(matchmaking_machine.Ended())
            elif is_broken_off and found.exception() is None:
                self._on(matchmaking_machine.RoundOver(found.result().leader, is_committed=False))
            found.cancel()
            self._stop_asking()

    def round_over(self, group: Group, blamed: Sequence[PeerId], *, is_committed: bool) -> None:
        """Note whether the round of a group gave this peer a result, and which members are to blame for a fault."""
        others = {member.peer_id for member in group.members} - {self._endpoint.peer_id}
        for peer_id in others.intersection(blamed):
            self._meeting.report_missing(peer_id)
        self._on(matchmaking_machine.RoundOver(group.leader, is_committed))
        self._was_in_group = True
        self._meet({member.peer_id: member.is_punchable for member in group.members if member.is_client})

    def follows(self, leader: PeerId) -> bool:
        """Whether this peer waits for a leader's group; false once it follows another leader."""
        return self._machine.stage is Stage.ASKING and self._machine.leader == leader

    @property
    def roster(self) -> Roster | None:
        """The roster at this peer's position; None where peers do not share one."""
        return self._meeting.attendees().roster

    def voters(self, group: Sequence[Member]) -> set[int]:
        """The ranks whose votes count in a round: the voters of the run; all, if none of them is in the group."""
        voters = self.roster.voters if self.roster is not None else frozenset()
        return {rank for rank, one in enumerate(group) if one.peer_id in voters} or set(range(len(group)))

    def hurried(self, group: Sequence[Member]) -> dict[int, float]:
        """The ranks of those for whom nobody waits long in a round, each with for how many seconds it may be the last.

        They reduce only if nobody else can.
        """
        roster = self.roster
        if roster is None:
            return {}
        hurried = roster.hurried([member.peer_id for member in group])
        return {
            rank: MOMENT_S if roster.was_often_at_fault(member.peer_id) else TWO_ANSWERS_S
            for rank, member in enumerate(group)
            if member.peer_id in hurried
        }

    # the machine

    def _on(self, event: Event) -> None:
        self._carry_out(self._machine.on(event, self._loop.time(), self._meeting.attendees()))
        self._news.set()
        if self._machine.is_wanted and self._looking is None and not self._tasks.is_closed:
            self._looking = self._tasks.spawn(self._look(), name="gathering a group")

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case matchmaking_machine.Ask(leader, patience_s):
                    self._stop_asking()
                    self._asking = self._tasks.spawn(self._ask(leader, patience_s), name=f"asking {leader}")
                case matchmaking_machine.Check(leader):
                    self._tasks.spawn(self._check(leader), name=f"looking for {leader}")
                case matchmaking_machine.Call(peer_id):
                    self._tasks.spawn(self._call(peer_id), name=f"calling {peer_id}")
                case matchmaking_machine.CallLoop():
                    self._meeting.call_to_round()
                case matchmaking_machine.SendOn(peers, leader):
                    response = JoinResponse(leader=leader, leader_addresses=self._addresses_of(leader))
                    for peer_id in peers:
                        _end(self._waiting.get(peer_id), response)
                case matchmaking_machine.Refuse(peers, code, reason):
                    for peer_id in peers:
                        _end(self._waiting.get(peer_id), Refused(self._endpoint.peer_id, code, reason))
                case matchmaking_machine.Close(members, late, missing):
                    for peer_id in missing:
                        logger.info("Peer %s did not come to the round in time", peer_id)
                        self._meeting.report_missing(peer_id)
                    group = self._group(members, late)
                    for member in members:
                        _end(self._waiting.get(member.peer_id), JoinResponse(group))
                    self._finish(group)
                case matchmaking_machine.Missing(peer_id):
                    self._meeting.report_missing(peer_id)
                case matchmaking_machine.Abort(reason, blamed, is_nobody_there):
                    self._stop_asking()
                    self._finish(NobodyThere(reason) if is_nobody_there else RoundAborted(reason, list(blamed)))

    def _finish(self, outcome: Group | RoundAborted) -> None:
        if self._found is None or self._found.done():
            return
        if isinstance(outcome, Group):
            self._found.set_result(outcome)
        else:
            self._found.set_exception(outcome)

    async def _look(self) -> None:
        """Tell the machine that time passes, for as long as others wait for what this peer does."""
        try:
            while self._machine.is_wanted:
                self._news.clear()
                left_s = self._machine.wake_at - self._loop.time()
                await wait_at_most(self._news, min(max(left_s, 0.0), LOOK_S))
                self._on(matchmaking_machine.Looked())
        finally:
            self._looking = None

    def _on_lost(self, peer_id: PeerId) -> None:
        """Stop waiting for a peer whose connection broke."""
        if peer_id in self._meeting.attendees().expected:
            self._meeting.report_missing(peer_id)
        self._on(matchmaking_machine.Withdrew(peer_id))

    def _group(self, members: Sequence[Member], late: int) -> Group:
        own_id, config = self._endpoint.peer_id, self._config
        rtts_s = [self._endpoint.rtt_s(member.peer_id) for member in members if member.peer_id != own_id]
        hurried = self.hurried(members)
        met = met_clients(members, self._ways)
        return Group(
            self._rng.randbytes(NAME_BYTES),
            own_id,
            self._meeting.position(),
            [
                msgspec.structs.replace(
                    member,
                    bandwidth=0 if rank in hurried else member.bandwidth,
                    may_reduce=member.may_reduce and rank not in hurried,
                    is_met=rank in met,
                )
                for rank, member in enumerate(members)
            ],
            codec=chosen_codec(config.codec, (member.bandwidth for member in members), rtts_s).code,
            late=int(late),
        )

    def _addresses_of(self, leader: PeerId) -> list[str]:
        return [str(address) for address in self._endpoint.addresses_to_tell(leader)]

    # calls of others

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._tasks.cancel(self._asking)
            self._asking = None

    async def _ask(self, leader: PeerId, patience_s: float) -> None:
        """Ask a leader for a place, until it answers."""
        own, position = self._own, self._meeting.position()
        assert own is not None
        if not self._endpoint.is_connected(leader):
            self._reach_all()
        ways = self._ways_to_clients()
        request = JoinRequest(
            self._run_fingerprint, position, own, min(patience_s, DAY_S), sorted(ways.punched), sorted(ways.relayed)
        )
        try:
            response = await self._endpoint.call(leader, JOIN, request, ask_s(patience_s))
        except (Unavailable, PeerError) as error:
            self._failed(leader, *_code_and_reason(error))
        else:
            if response.group is not None:
                fault = fault_of(response.group, leader, own, position, self._config.codec)
                if fault is not None:
                    self._failed(leader, matchmaking_machine.GONE, fault)
                else:
                    self._asking = None
                    self._on(matchmaking_machine.Formed())
                    self._finish(response.group)
            elif response.leader:
                self._asking = None
                self._endpoint.learn(response.leader, readable_addresses(response.leader_addresses))
                self._on(matchmaking_machine.SentOn(response.leader))
            else:
                self._failed(leader, matchmaking_machine.LATE, f"peer {leader} gives this one no place")

    def _ways_to_clients(self) -> Ways:
        """How this peer can exchange with other clients, if it is one too; of which run they are, the leader knows."""
        if not self._endpoint.client_mode:
            return Ways()
        ways = self._endpoint.ways()
        punched = [peer_id for peer_id, way in ways.items() if way == PUNCHED]
        relayed = [
            peer_id for peer_id, way in ways.items() if way.relay is not None and self._endpoint.carries_bulk(peer_id)
        ]
        return Ways(frozenset(punched[:MAX_CLIENTS_MET]), frozenset(relayed[:MAX_CLIENTS_MET]))

    def meet_members(self) -> None:
        """Connect to the clients among the members of the run, until this peer is in its first group.

        Else none of them could reduce in that round. What is known of their routers is said in a group.
        """
        roster = self.roster
        if self._endpoint.client_mode and not self._was_in_group and roster is not None:
            standings = roster.standings.items()
            self._meet({peer_id: True for peer_id, one in standings if one.is_member and not one.can_lead})

    def _meet(self, clients: Mapping[PeerId, bool]) -> None:
        """Connect to other clients in the background, so that this peer may reduce with them, or they for it.

        That is best done between rounds: during a round, values are sent on the same lines.

        Args:
            clients: each with whether it is punchable.
        """
        if self._tasks.is_closed or not self._endpoint.client_mode or not self._endpoint.outside.is_known:
            return
        roster = self.roster
        members = roster.members if roster is not None else ()
        to_meet = clients_to_meet(self._endpoint.peer_id, {**clients, self._endpoint.peer_id: True}, members)
        unmet = [peer_id for peer_id in to_meet if not self._endpoint.is_connected(peer_id)]
        if unmet and (self._greeting is None or self._greeting.done()):
            self._rng.shuffle(unmet)
            self._greeting = self._tasks.spawn(self._greet(unmet), name="connecting to other clients")

    async def _greet(self, clients: Sequence[PeerId]) -> None:
        """Connect to other clients, some at a time; end at the first that fails."""
        for first in range(0, len(clients), GREETED_AT_ONCE):
            at_once = clients[first : first + GREETED_AT_ONCE]
            if not all(await asyncio.gather(*(self._is_met(peer_id) for peer_id in at_once))):
                return

    async def _is_met(self, peer_id: PeerId) -> bool:
        try:
            await self._endpoint.ping(peer_id, DIAL_S)
        except (Unavailable, PeerError) as error:
            logger.debug("client %s is not connected: %s", peer_id, error)
            return False
        return True

    def _failed(self, leader: PeerId, code: str, reason: str) -> None:
        logger.info("Peer %s cannot lead this round: %s", leader, reason)
        self._asking = None
        self._on(matchmaking_machine.Failed(leader, code, reason))

    def _reach_all(self) -> None:
        """Dial all hosts at once: those that cannot be reached are then known before this peer has to ask them."""
        for peer_id, is_client in self._meeting.attendees().expected.items():
            if not is_client and not self._endpoint.is_connected(peer_id) and peer_id not in self._reaching:
                self._reaching.add(peer_id)
                self._tasks.spawn(self._reach(peer_id), name=f"dialling {peer_id}")

    async def _reach(self, peer_id: PeerId) -> None:
        try:
            await self._endpoint.ping(peer_id, DIAL_S)
        except Unavailable as error:
            self._call_failed(peer_id, matchmaking_machine.GONE, str(error))
        except PeerError:
            pass  # an answer shows that it can be reached
        finally:
            self._reaching.discard(peer_id)

    async def _check(self, leader: PeerId) -> None:
        try:
            await self._endpoint.ping(leader, ANSWER_S)
        except (Unavailable, PeerError) as error:
            if self.follows(leader):
                self._stop_asking()
                self._failed(leader, matchmaking_machine.GONE, str(error))

    async def _call(self, peer_id: PeerId) -> None:
        request = CallRequest(self._run_fingerprint, self._meeting.position())
        try:
            response = await self._endpoint.call(peer_id, CALL, request, self._config.matchmaking_time_s)
        except (Unavailable, PeerError) as error:
            self._call_failed(peer_id, *_code_and_reason(error))
        else:
            if response.leader and response.leader != self._endpoint.peer_id:
                self._endpoint.learn(response.leader, readable_addresses(response.leader_addresses))
            self._on(matchmaking_machine.Follows(peer_id, response.leader or None))

    def _call_failed(self, peer_id: PeerId, code: str, reason: str) -> None:
        logger.info("Peer %s does not come to this round: %s", peer_id, reason)
        self._on(matchmaking_machine.CallFailed(peer_id, code, reason))

    # what others ask

    async def _on_join(self, remote: PeerId, request: JoinRequest) -> JoinResponse:
        await self._catch_up(request.position)
        who = self._meeting.attendees()
        check_join(
            self._endpoint.peer_id, self._run_fingerprint, who.position, who.roster, remote, request,
            is_client=self._endpoint.client_mode,
        )  # fmt: skip
        self._endpoint.learn(remote, readable_addresses(request.member.addresses))
        _end(self._waiting.get(remote), JoinResponse())  # the peer asks again: its former call ends
        answer: asyncio.Future[JoinResponse] = self._loop.create_future()
        self._waiting[remote] = answer
        self._ways[remote] = Ways(frozenset(request.punched), frozenset(request.relayed))
        try:
            self._on(matchmaking_machine.Asked(request.member, request.patience_s))
            return await answer
        finally:
            if self._waiting.get(remote) is answer:
                del self._waiting[remote]
                del self._ways[remote]
                if not answer.done() or answer.cancelled():
                    self._on(matchmaking_machine.Withdrew(remote))
            answer.cancel()

    async def _on_call(self, remote: PeerId, request: CallRequest) -> CallResponse:
        await self._catch_up(request.position)
        here = self._meeting.position()
        check_call(self._endpoint.peer_id, self._run_fingerprint, here, request)
        if request.position != here:
            return CallResponse()
        self._on(matchmaking_machine.Called(remote))
        leader = self._machine.follows
        if leader in (None, remote) or self._machine.stage is Stage.GROUPED:
            return CallResponse()
        assert leader is not None
        return CallResponse(leader, self._addresses_of(leader))

    async def _catch_up(self, position: Position) -> None:
        """Wait for this peer to reach a position that others may have reached a moment earlier."""
        deadline = self._loop.time() + self._config.matchmaking_time_s
        while (here := self._meeting.position()).step < position.step:
            now = self._loop.time()
            is_later = is_later_round(position, here)
            is_between = now < self._ended_at + MOMENT_S  # between two rounds of a step in a grid
            is_coming = is_later and (is_between or self._found is not None)
            if not (is_coming or self._machine.stage is Stage.GROUPED) or now > deadline:
                return
            await asyncio.sleep(SOON_S)


def _code_and_reason(error: Unavailable | PeerError) -> tuple[str, str]:
    """The code and the reason, for the machine, of a call that failed or was refused."""
    if isinstance(error, Refused):
        return error.code, error.message
    return matchmaking_machine.LATE if isinstance(error, Timeout) else matchmaking_machine.GONE, str(error)


def _end(answer: asyncio.Future[JoinResponse] | None, result: JoinResponse | Refused) -> None:
    """Answer a peer that waits; only the first answer counts."""
    if answer is None or answer.done():
        return
    if isinstance(result, JoinResponse):
        answer.set_result(result)
    else:
        answer.set_exception(result)
