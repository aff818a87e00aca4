"""How a monitor that starts late gets the history of a run from other coordinators, and hands out its own.

Monitors are found under a key of the DHT. What comes is the word of one coordinator: it only fills gaps before this
monitor's own time, and a credited step counts if more than half of those that go back as far tell the same.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec

from manyhands.access.gate import RunGate
from manyhands.averaging.messages import MAX_ADDRESSES, AddressText, Count, PeerIdText, readable_addresses
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ManyhandsError, Refused
from manyhands.base.identity import PeerId
from manyhands.dht import Schema
from manyhands.monitor.credit import CreditedStep
from manyhands.monitor.history import History
from manyhands.monitor.picture import EventKind, Point, RunEvent
from manyhands.optim.metrics import MAX_LISTS_BYTES, MAX_NAME
from manyhands.optim.run.branches import voter_of
from manyhands.peer import Presence
from manyhands.rpc import Method
from manyhands.rpc.frames import readable
from manyhands.rpc.rate import Buckets

logger = logging.getLogger(__name__)

TTL_S = 120.0
RENEW_S = 40.0
MAX_ASKED = 5
CALL_TIMEOUT_S = 10.0
ASK_TIMEOUT_S = 600.0
"""For the whole history of one monitor."""
RETRY_PERIOD_S = 60.0
MAX_POINTS = 2000
"""In one answer: 200 KB."""
MAX_EVENTS = 500
MAX_PEERS = 4000
MAX_STEPS = 1000
MAX_LISTS = 256_000
"""Bytes of the lists in one answer."""
MAX_PAGES = 2000
REQUESTS_PER_S_OF_PEER = 2.0
REQUESTS_PER_S = 10.0
PAUSE_S = 1 / REQUESTS_PER_S_OF_PEER
MAX_TOLD_BYTES = 64_000_000
MAX_TIME = 1e11

Finite = Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME)]
K = TypeVar("K")


class CoordinatorRecord(msgspec.Struct, frozen=True):
    """A coordinator that watches the run; ``since`` when, in seconds since 1970."""

    addresses: Annotated[list[AddressText], msgspec.Meta(max_length=MAX_ADDRESSES)]
    since: Finite = 0.0


class HistoryRequest(msgspec.Struct, frozen=True):
    """Asks for what was before.

    Attributes:
        kind: what of it.
        before_step: points and credited steps below this one.
        before: events before this time, in seconds since 1970.
    """

    kind: Literal["points", "steps", "events", "peers"]
    before_step: Count = 0
    before: Finite = 0.0


class ToldStep(msgspec.Struct, frozen=True, array_like=True):
    """A credited step."""

    step: Count
    after: Annotated[bytes, msgspec.Meta(max_length=8)]
    shares: Annotated[bytes, msgspec.Meta(max_length=MAX_LISTS_BYTES * 8)]


class ToldPoint(msgspec.Struct, frozen=True, array_like=True):
    """A point of the curves; see :class:`manyhands.monitor.picture.Point`."""

    time: Finite
    step: Count
    loss: float | None
    heldout_loss: float | None
    samples: Count
    samples_per_second: Finite
    peers: Count
    learning_rate: float | None
    bytes_sent: Count | None

    def __post_init__(self) -> None:
        said = (self.loss, self.heldout_loss, self.learning_rate)
        if not all(number is None or math.isfinite(number) for number in said):
            raise ValueError("numbers are finite")


class ToldEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event; see :class:`manyhands.monitor.picture.RunEvent`."""

    time: Finite
    kind: EventKind
    text: Annotated[str, msgspec.Meta(max_length=1000)]
    step: Count
    peer_id: Annotated[str, msgspec.Meta(max_length=64)]
    name: Annotated[str, msgspec.Meta(max_length=64)]


class ToldPeer(msgspec.Struct, frozen=True, array_like=True):
    """A peer that has taken part in the run."""

    peer_id: PeerIdText
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]

    def __post_init__(self) -> None:
        if not self.name.isprintable():
            raise ValueError("a name has no control characters")


class HistoryResponse(msgspec.Struct, frozen=True):
    """A page of what was asked for, the last part of it; empty at the beginning of the history."""

    points: Annotated[list[ToldPoint], msgspec.Meta(max_length=MAX_POINTS)] = []
    steps: Annotated[list[ToldStep], msgspec.Meta(max_length=MAX_STEPS)] = []
    events: Annotated[list[ToldEvent], msgspec.Meta(max_length=MAX_EVENTS)] = []
    peers: Annotated[list[ToldPeer], msgspec.Meta(max_length=MAX_PEERS)] = []


HISTORY = Method("monitor.history", HistoryRequest, HistoryResponse)
COORDINATORS = Schema(CoordinatorRecord, is_owned=True, max_ttl_s=10 * TTL_S)


def coordinators_key(run_id: str) -> str:
    """The DHT key under which the monitors of a run are found."""
    return f"{run_id}.monitors"


class Told(msgspec.Struct):
    """What other coordinators have told."""

    points: list[Point] = []
    steps: list[CreditedStep] = []
    events: list[RunEvent] = []
    peers: list[ToldPeer] = []
    origin: str = ""


class Exchange:
    """One monitor's part. Lives on the network thread.

    Args:
        history: read in the loop's executor.
    """

    def __init__(self, presence: Presence, run_id: str, history: History) -> None:
        self._presence = presence
        self._gate = RunGate(presence.endpoint, run_id, for_observers=True)
        self._method = RunEndpoint(presence.endpoint, run_id).method(HISTORY)
        self._key = coordinators_key(run_id)
        self._history = history
        self._since = presence.wall_clock()
        self._of_peer = Buckets(REQUESTS_PER_S_OF_PEER)
        self._of_all = Buckets(REQUESTS_PER_S)
        presence.dht.declare(self._key, COORDINATORS)
        presence.endpoint.handle(self._method, self._on_history, self._gate.check)

    def close(self) -> None:
        """Stop serving."""
        self._presence.endpoint.unhandle(self._method)

    # serve

    async def _on_history(self, remote: PeerId, request: HistoryRequest) -> HistoryResponse:
        now = asyncio.get_running_loop().time()
        if not (self._of_peer.take(remote, now) and self._of_all.take("", now)):
            raise Refused(remote, "too_many_requests", "ask for the history more slowly")
        return await asyncio.get_running_loop().run_in_executor(None, self._page, request)

    def _page(self, request: HistoryRequest) -> HistoryResponse:
        self._history.flush()
        if request.kind == "peers":
            known = sorted(self._history.peers().values(), key=lambda known: -known.last_seen)
            return HistoryResponse(peers=[ToldPeer(PeerId(peer.peer_id), peer.name) for peer in known[:MAX_PEERS]])
        if request.kind == "events":
            events = self._history.events(MAX_EVENTS, request.before)
            return HistoryResponse(events=[_told(event, ToldEvent) for event in events])
        if request.kind == "points":
            points = self._history.points_before(request.before_step, MAX_POINTS)
            return HistoryResponse(points=[_told(point, ToldPoint) for point in points])
        steps: list[ToldStep] = []
        room = MAX_LISTS
        for step in self._history.steps(request.before_step, MAX_STEPS):
            room -= len(step.shares)
            if room < 0 and steps:
                break
            steps.append(ToldStep(step.step, step.after, step.shares))
        return HistoryResponse(steps=steps)

    async def publish_forever(self) -> None:
        """Let other monitors find this one."""
        endpoint = self._presence.endpoint
        while True:
            addresses = [str(address) for address in endpoint.addresses[:MAX_ADDRESSES]]
            value = msgspec.to_builtins(CoordinatorRecord(addresses, self._since))
            try:
                await self._presence.dht.store(self._key, value, TTL_S, subkey=self._presence.peer_id)
            except ManyhandsError as error:
                logger.debug("other monitors cannot find this one: %s", error)
            await asyncio.sleep(RENEW_S)

    # ask

    async def ask(self, before_step: int, before: float) -> Told | None:
        """Ask other coordinators for what was before; None if there are none, or none answers.

        Args:
            before_step: the first step that this monitor has seen; ``before``: the time.
        """
        found = await self._presence.dht.get(self._key)
        others: dict[PeerId, CoordinatorRecord] = {}
        for subkey, stored in found.items():
            if stored.owner == subkey != self._presence.peer_id:
                record = COORDINATORS.decode(stored.raw)
                self._presence.endpoint.learn(PeerId(subkey), readable_addresses(record.addresses))
                others[PeerId(subkey)] = record
        asked = chosen(others, self._presence.rng)
        answers = await asyncio.gather(*(self._ask_one(peer_id, before_step, before) for peer_id in asked))
        return merged([answer for answer in answers if answer is not None])

    async def _ask_one(self, peer_id: PeerId, before_step: int, before: float) -> Told | None:
        told = Told(origin=peer_id)
        try:
            async with time_limit(ASK_TIMEOUT_S, f"for the history that {peer_id} has"):
                answer = await self._call(peer_id, HistoryRequest("events", before=before))
                told.events = [_readable(event) for event in answer.events if event.time < before]
                told.peers = (await self._call(peer_id, HistoryRequest("peers"))).peers
                await self._pages(peer_id, "points", before_step, told)
                await self._pages(peer_id, "steps", before_step, told)
        except ManyhandsError as error:
            logger.info("monitor %s has not sent the history of the run: %s", peer_id, error)
            return told if told.points else None
        return told

    async def _pages(self, peer_id: PeerId, kind: Literal["points", "steps"], before_step: int, told: Told) -> None:
        num_bytes = 0
        for _ in range(MAX_PAGES):
            answer = await self._call(peer_id, HistoryRequest(kind, before_step))
            page: Sequence[ToldPoint | ToldStep] = answer.points if kind == "points" else answer.steps
            numbers = [entry.step for entry in page]
            num_bytes += sum(len(step.shares) + 64 for step in answer.steps) + 128 * len(answer.points)
            if not numbers or max(numbers) >= before_step or num_bytes > MAX_TOLD_BYTES:
                return
            told.points += [_untold(point) for point in answer.points]
            told.steps += [CreditedStep(step.step, step.after, 0, step.shares, peer_id) for step in answer.steps]
            before_step = min(numbers)
            await asyncio.sleep(PAUSE_S)

    async def _call(self, peer_id: PeerId, request: HistoryRequest) -> HistoryResponse:
        call = self._presence.endpoint.call
        return await self._gate.through(
            peer_id, CALL_TIMEOUT_S, lambda left_s: call(peer_id, self._method, request, left_s)
        )


def chosen(others: Mapping[PeerId, CoordinatorRecord], rng: random.Random) -> list[PeerId]:
    """Which coordinators to ask: the one that says it is oldest, and others at random; one of each network.

    So those that lie about their age, or have many ids in one place, cannot take all seats.
    """
    oldest_first = sorted(others, key=lambda peer_id: (others[peer_id].since, peer_id))
    of_network = {voter_of(peer_id, others[peer_id].addresses): peer_id for peer_id in reversed(oldest_first)}
    oldest, rest = oldest_first[:1], [peer_id for peer_id in of_network.values() if peer_id not in oldest_first[:1]]
    return oldest + rng.sample(rest, min(MAX_ASKED - 1, len(rest)))


def merged(answers: Sequence[Told]) -> Told | None:
    """What to believe of several answers; None without any.

    The credited steps that more than half tell alike of the coordinators whose history reaches back to them; points,
    events and names of the one that has most.
    """
    if not answers:
        return None
    most = max(answers, key=lambda told: (len(told.points), told.origin))
    votes: defaultdict[int, Counter[tuple[bytes, bytes]]] = defaultdict(Counter)
    tellers: dict[tuple[int, bytes, bytes], str] = {}
    for told in answers:
        for step in {step.step: step for step in told.steps}.values():
            votes[step.step][step.after, step.shares] += 1
            tellers.setdefault((step.step, step.after, step.shares), told.origin)
    begins = [min(step.step for step in told.steps) for told in answers if told.steps]
    steps = []
    for number, counts in votes.items():
        (after, shares), count = counts.most_common(1)[0]
        if 2 * count > sum(begin <= number for begin in begins):
            steps.append(CreditedStep(number, after, 0, shares, tellers[number, after, shares]))
    return Told(most.points, steps, most.events, most.peers, most.origin)


def _told(entry: Point | RunEvent, kind: Callable[..., K]) -> K:
    return kind(**{name: getattr(entry, name) for name in kind.__struct_fields__})  # type: ignore[attr-defined]


def _untold(point: ToldPoint) -> Point:
    return Point(**msgspec.structs.asdict(point))


def _readable(event: ToldEvent) -> RunEvent:
    return RunEvent(
        time=event.time, kind=event.kind, text=readable(event.text), step=event.step, peer_id=readable(event.peer_id),
        name=readable(event.name),
    )  # fmt: skip
