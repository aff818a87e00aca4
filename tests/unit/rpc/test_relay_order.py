"""In which order relays are asked, which one is used, and which one is blamed."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import pytest

from manyhands.base.errors import Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc.config import RpcConfig
from manyhands.rpc.dialling import Dialler, Opened
from manyhands.rpc.frames import CONTROL, Hello, Welcome
from manyhands.rpc.relayed_streams import RelayedStreams
from manyhands.runtime.tasks import TaskOwner
from manyhands.testing import World

NAMED, STRANGER, FAILED, TARGET = (PeerId(name) for name in ("named", "stranger", "failed", "target"))


@dataclass
class Way:
    """What becomes of a stream through one relay: it is there after ``reached_s``, and welcome after ``welcome_s``."""

    reached_s: float = 0.0
    welcome_s: float = 0.0
    refusal: Exception | None = None


class FakeStream:
    """A stream through a relay, which may be released."""

    def __init__(self, relay: PeerId) -> None:
        self.relay = relay
        self.is_released = False


class Caller(Dialler):
    """Asks relays that behave as told.

    Attributes:
        asked, greeted, reached: relays, in this order.
    """

    def __init__(self, ways: dict[PeerId, Way]) -> None:
        super().__init__(*[cast("Any", None)] * 3)
        self.ways = ways
        self.asked: list[PeerId] = []
        self.greeted: list[PeerId] = []
        self.reached: list[FakeStream] = []
        self.tasks = TaskOwner("relays")
        self.streams = RelayedStreams(
            cast("Any", self), self, cast("Any", self), self.tasks, Counter(), RpcConfig(), self.open_to,
            *[cast("Any", None)] * 3, lambda relay: relay == NAMED,
        )  # fmt: skip

    async def open_to(self, relay: PeerId, _hello: Hello, _timeout_s: float) -> Opened:
        self.asked.append(relay)
        way = self.ways.get(relay, Way(refusal=Unavailable("not there")))
        await asyncio.sleep(way.reached_s)
        if way.refusal is not None:
            raise way.refusal
        return Opened(cast("Any", FakeStream(relay)), Welcome("", []), None, 0.0)

    async def dial_through(self, carrier: FakeStream, target: PeerId, timeout_s: float, *, is_bulk: bool) -> FakeStream:
        self.reached.append(carrier)
        return carrier

    async def greet(self, stream: Any, address: Any, hello: Hello, timeout_s: float) -> Opened:
        self.greeted.append(stream.relay)
        way = self.ways[stream.relay]
        if way.welcome_s > timeout_s:
            await asyncio.sleep(timeout_s)
            stream.is_released = True
            raise Unavailable("no welcome")
        await asyncio.sleep(way.welcome_s)
        return Opened(stream, Welcome("", []), None, 0.0)

    def add(self, stream: FakeStream) -> None:
        """As a set of streams."""

    def release(self, stream: FakeStream) -> None:
        stream.is_released = True

    async def relay_of(self, relays: list[PeerId], timeout_s: float = 3.0) -> PeerId | None:
        return (await self.streams.open(relays, TARGET, Hello(CONTROL), timeout_s)).way.relay

    async def next_ones(self, relays: list[PeerId]) -> list[PeerId]:
        """In which order relays would be asked now."""
        self.ways, self.asked = {}, []
        with pytest.raises(Unavailable):
            await self.relay_of(relays)
        return self.asked


A, B, C = (PeerId(name) for name in "abc")


def test_a_slow_relay_goes_on_while_the_next_is_asked_and_is_blamed_for_nothing() -> None:
    async def story() -> None:
        caller = Caller({A: Way(1.5), B: Way(9.0)})
        assert await caller.relay_of([A, B, C]) == A
        assert caller.asked == [A, B], "the second after a third of the time"
        assert await caller.next_ones([A, B]) == [A, B]

    World(1).story(story())


def test_a_silent_relay_costs_its_head_start_and_is_asked_last_from_then_on() -> None:
    async def story() -> None:
        caller = Caller({A: Way(9.0), B: Way(0.1)})
        began = asyncio.get_running_loop().time()
        assert await caller.relay_of([A, B, C]) == B
        assert asyncio.get_running_loop().time() == pytest.approx(began + 1.1)
        assert await caller.next_ones([A, B]) == [B, A]

    World(1).story(story())


def test_a_relay_that_was_asked_a_moment_ago_is_blamed_for_nothing() -> None:
    """Another one has refused just after the head start, so a third was asked at once, and is fast."""

    async def story() -> None:
        refusal = Refused(A, "not_reached", "no")
        caller = Caller({A: Way(1.1, refusal=refusal), B: Way(0.5), C: Way(0.1)})
        assert await caller.relay_of([A, B, C]) == C
        assert await caller.next_ones([A, B, C]) == [A, B, C]
        await asyncio.sleep(1.0)
        assert [stream.relay for stream in caller.reached] == [C], "the other was given up"

    World(1).story(story())


def test_the_target_gets_one_hello_at_a_time_and_a_stream_that_came_too_late_is_released() -> None:
    async def story() -> None:
        caller = Caller({A: Way(1.1, welcome_s=9.0), B: Way(0.3, welcome_s=0.1)})
        assert await caller.relay_of([A, B, C]) == B
        assert caller.greeted == [A, B]
        assert [(stream.relay, stream.is_released) for stream in caller.reached] == [(A, True), (B, False)]
        caller = Caller({A: Way(0.5, welcome_s=0.9), B: Way(0.2)})
        assert await caller.relay_of([A, B, C]) == A
        assert caller.greeted == [A]

    World(1).story(story())


def test_the_answer_of_the_target_ends_the_search() -> None:
    async def story() -> None:
        caller = Caller({A: Way(0.1, refusal=Refused(TARGET, "banned", "no"))})
        with pytest.raises(Refused, match="banned"):
            await caller.relay_of([A, B, C])
        assert caller.asked == [A]

    World(1).story(story())


def test_a_peer_that_is_closed_meanwhile_says_so() -> None:
    async def story() -> None:
        caller = Caller({A: Way(9.0), B: Way(9.0), C: Way(9.0)})
        asking = asyncio.ensure_future(caller.relay_of([A, B, C]))
        await asyncio.sleep(0.5)
        await caller.close()
        await caller.tasks.close()
        with pytest.raises(Unavailable, match="closed"):
            await asking

    World(1).story(story())


@pytest.mark.parametrize(("has_failed", "order"), [(False, [STRANGER, NAMED]), (True, [NAMED, STRANGER])])
async def test_relays_that_the_user_named_come_first_once_one_has_failed(has_failed: bool, order: list[PeerId]) -> None:
    """Also if that one is not among those that are asked, as when its connections move to another relay."""
    caller = Caller({})
    if has_failed:
        caller.streams.failed(FAILED)
    with pytest.raises(Unavailable, match="relay stranger: not there"):
        await caller.streams.open([STRANGER, NAMED], TARGET, Hello(CONTROL), 1.0)
    assert caller.asked == order


async def test_relays_that_failed_come_last_in_the_order_in_which_they_failed() -> None:
    caller = Caller({})
    caller.streams.failed(NAMED)
    caller.streams.failed(FAILED)
    with pytest.raises(Unavailable):
        await caller.streams.open([FAILED, NAMED, STRANGER], TARGET, Hello(CONTROL), 1.0)
    assert caller.asked == [STRANGER, NAMED, FAILED]
