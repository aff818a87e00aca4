"""A monitor that starts late fetches the history of a run from other monitors, and serves its own history to others.

It asks only the peers that were named to it: the coordinators in the charter of the run, and its initial peers. It
trusts their answers, which fill gaps before its own start and change nothing after it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec

from manyhands.access.gate import RunGate
from manyhands.averaging.messages import Count, PeerIdText
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.deadline import time_limit
from manyhands.base.errors import Refused
from manyhands.base.identity import PeerId
from manyhands.base.rate import Buckets, SharedBuckets
from manyhands.monitor.credit import CreditedStep
from manyhands.monitor.history import History
from manyhands.monitor.picture import EventKind, Point, RunEvent
from manyhands.optim.metrics import MAX_LISTS_BYTES, MAX_NAME
from manyhands.peer import Presence
from manyhands.rpc import Method
from manyhands.rpc.frames import readable

CALL_TIMEOUT_S = 10.0
ASK_TIMEOUT_S = 600.0
"""Longest time in seconds to fetch the whole history of one monitor."""
MAX_POINTS = 2000
"""Most points in one answer: 200 KB."""
MAX_EVENTS = 500
MAX_PEERS = 4000
MAX_STEPS = 1000
MAX_LISTS = 256_000
"""Most bytes of the lists in one answer. An answer with a single list may have more."""
REQUESTS_PER_S_OF_PEER = 2.0
REQUESTS_PER_S = 10.0
PAUSE_S = 1 / REQUESTS_PER_S_OF_PEER
MAX_TOLD_BYTES = 64_000_000
MAX_TIME = 1e11

Finite = Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME)]
K = TypeVar("K")


class HistoryRequest(msgspec.Struct, frozen=True):
    """Asks for a part of the earlier history.

    Attributes:
        kind: which part.
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
        numbers = (self.loss, self.heldout_loss, self.learning_rate)
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise ValueError("loss, heldout_loss and learning_rate must be finite")


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
            raise ValueError("a name must have no control characters")


class HistoryResponse(msgspec.Struct, frozen=True):
    """One page: the last of the requested entries. It is empty if there are none."""

    points: Annotated[list[ToldPoint], msgspec.Meta(max_length=MAX_POINTS)] = []
    steps: Annotated[list[ToldStep], msgspec.Meta(max_length=MAX_STEPS)] = []
    events: Annotated[list[ToldEvent], msgspec.Meta(max_length=MAX_EVENTS)] = []
    peers: Annotated[list[ToldPeer], msgspec.Meta(max_length=MAX_PEERS)] = []


HISTORY = Method("monitor.history", HistoryRequest, HistoryResponse)


class Told(msgspec.Struct):
    """The history that another monitor has sent."""

    points: list[Point] = []
    steps: list[CreditedStep] = []
    events: list[RunEvent] = []
    peers: list[ToldPeer] = []


def named_peers(presence: Presence, run_id: str) -> list[PeerId]:
    """The peers that a monitor asks: the coordinators in the charter of the run, and its own initial peers."""
    members = presence.members.get(run_id)
    coordinators = members.charter.coordinators if members is not None else ()
    named = dict.fromkeys([*coordinators, *sorted(presence.dht.initial_peers())])
    return [peer_id for peer_id in named if peer_id != presence.peer_id]


class Exchange:
    """Serves the history of one monitor, and asks others for theirs. For use on the network thread only.

    Args:
        history: read in the loop's executor.
    """

    def __init__(self, presence: Presence, run_id: str, history: History) -> None:
        self._presence = presence
        self._gate = RunGate(presence.endpoint, run_id, for_observers=True)
        self._method = RunEndpoint(presence.endpoint, run_id).method(HISTORY)
        self._history = history
        self._requests = SharedBuckets(Buckets(REQUESTS_PER_S_OF_PEER), Buckets(REQUESTS_PER_S))
        presence.endpoint.handle(self._method, self._on_history, self._gate.check)

    def close(self) -> None:
        """Stop serving."""
        self._presence.endpoint.unhandle(self._method)

    # serve

    async def _on_history(self, remote: PeerId, request: HistoryRequest) -> HistoryResponse:
        if not self._requests.take(remote, asyncio.get_running_loop().time()):
            raise Refused(remote, "too_many_requests", "ask for the history more slowly")
        return await asyncio.get_running_loop().run_in_executor(None, self._page, request)

    def _page(self, request: HistoryRequest) -> HistoryResponse:
        self._history.flush()
        if request.kind == "peers":
            known = sorted(self._history.peers().values(), key=lambda known: -known.last_seen)
            return HistoryResponse(peers=[ToldPeer(PeerId(peer.peer_id), peer.name) for peer in known[:MAX_PEERS]])
        if request.kind == "events":
            events = self._history.events(MAX_EVENTS, request.before)
            return HistoryResponse(events=[_to_wire(event, ToldEvent) for event in events])
        if request.kind == "points":
            points = self._history.points_before(request.before_step, MAX_POINTS)
            return HistoryResponse(points=[_to_wire(point, ToldPoint) for point in points])
        steps: list[ToldStep] = []
        room = MAX_LISTS
        for step in self._history.steps(request.before_step, MAX_STEPS):
            room -= len(step.shares)
            if room < 0 and steps:
                break
            steps.append(ToldStep(step.step, step.after, step.shares))
        return HistoryResponse(steps=steps)

    # ask

    async def ask(self, peer_id: PeerId, before_step: int, before: float) -> Told:
        """Ask a peer for the history before this monitor's own.

        Args:
            before_step: the first step that this monitor has seen.
            before: the time at which it began, in seconds since 1970.
        Raises:
            ManyhandsError: the peer has not sent all of it; it may be no monitor.
        """
        told = Told()
        async with time_limit(ASK_TIMEOUT_S, f"for the history that {peer_id} has"):
            answer = await self._call(peer_id, HistoryRequest("events", before=before))
            told.events = [_readable(event) for event in answer.events if event.time < before]
            told.peers = (await self._call(peer_id, HistoryRequest("peers"))).peers
            await self._ask_pages(peer_id, "points", before_step, told)
            await self._ask_pages(peer_id, "steps", before_step, told)
        return told

    async def _ask_pages(self, peer_id: PeerId, kind: Literal["points", "steps"], before_step: int, told: Told) -> None:
        num_bytes = 0
        while num_bytes <= MAX_TOLD_BYTES:
            answer = await self._call(peer_id, HistoryRequest(kind, before_step))
            page: Sequence[ToldPoint | ToldStep] = answer.points if kind == "points" else answer.steps
            numbers = [entry.step for entry in page]
            if not numbers or max(numbers) >= before_step:
                return
            told.points += [_from_wire(point) for point in answer.points]
            told.steps += [CreditedStep(step.step, step.after, 0, step.shares) for step in answer.steps]
            num_bytes += sum(len(step.shares) + 64 for step in answer.steps) + 128 * len(answer.points)
            before_step = min(numbers)
            await asyncio.sleep(PAUSE_S)

    async def _call(self, peer_id: PeerId, request: HistoryRequest) -> HistoryResponse:
        call = self._presence.endpoint.call
        return await self._gate.through(
            peer_id, CALL_TIMEOUT_S, lambda left_s: call(peer_id, self._method, request, left_s)
        )


def _to_wire(entry: Point | RunEvent, kind: Callable[..., K]) -> K:
    return kind(**{name: getattr(entry, name) for name in kind.__struct_fields__})  # type: ignore[attr-defined]


def _from_wire(point: ToldPoint) -> Point:
    return Point(**msgspec.structs.asdict(point))


def _readable(event: ToldEvent) -> RunEvent:
    return RunEvent(
        time=event.time, kind=event.kind, text=readable(event.text), step=event.step, peer_id=readable(event.peer_id),
        name=readable(event.name),
    )  # fmt: skip
