"""Dials to peers that came by themselves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, cast

from manyhands.base.errors import Unavailable
from manyhands.base.identity import PeerId
from manyhands.dht.reachability_check import (
    AT_ONCE,
    DOUBTED_AFTER_S,
    FIRST_WAIT_S,
    MAX_STRANGERS,
    MOST_WAIT_S,
    MOVED_WAIT_S,
    DialBack,
)
from manyhands.rpc import Endpoint
from manyhands.testing import VirtualLoop


class Dials:
    """An endpoint whose dials take a while, and succeed or not.

    Attributes:
        begun: when each began.
        most: that were under way at once.
    """

    def __init__(self, seconds: float, *, is_reached: bool) -> None:
        self.begun: list[float] = []
        self.most = 0
        self.is_reached = is_reached
        self.is_here = True
        self._seconds = seconds
        self._num = 0

    def has_reached(self, peer_id: PeerId) -> bool:
        return False

    def is_connected(self, peer_id: PeerId) -> bool:
        return self.is_here

    async def reach(self, peer_id: PeerId, timeout_s: float) -> None:
        self.begun.append(now())
        self._num += 1
        self.most = max(self.most, self._num)
        try:
            await asyncio.sleep(self._seconds)
        finally:
            self._num -= 1
        if not self.is_reached:
            raise Unavailable("nobody answers")


def now() -> float:
    return asyncio.get_running_loop().time()


def story(dials: Dials, tell: Callable[[DialBack], Coroutine[Any, Any, None]]) -> list[tuple[float, str, PeerId]]:
    """What a dial_back said of whom, and when."""
    said: list[tuple[float, str, PeerId]] = []

    async def run() -> None:
        dial_back = DialBack(
            cast(Endpoint, dials),
            lambda peer_id: said.append((now(), "reached", peer_id)),
            lambda peer_id: said.append((now(), "failed", peer_id)),
            lambda peer_id: said.append((now(), "doubted", peer_id)),
            3.0,
        )
        await tell(dial_back)
        await dial_back.close()

    VirtualLoop().run(run(), math.inf)
    return said


def test_a_stranger_is_trusted_until_its_dial_takes_long_and_again_when_it_was_reached() -> None:
    async def tell(dial_back: DialBack) -> None:
        assert dial_back.meet(PeerId("near"))
        assert not dial_back.meet(PeerId("near")), "it is dialled already"
        await asyncio.sleep(10.0)

    assert story(Dials(0.3, is_reached=True), tell) == [(0.3, "reached", "near")]
    assert story(Dials(2.0, is_reached=True), tell) == [
        (DOUBTED_AFTER_S, "failed", "near"),
        (DOUBTED_AFTER_S, "doubted", "near"),
        (2.0, "reached", "near"),
    ]
    assert story(Dials(0.3, is_reached=False), tell) == [(0.3, "failed", "near"), (DOUBTED_AFTER_S, "doubted", "near")]


def test_a_peer_that_could_not_be_dialled_is_doubted_and_dialled_less_and_less_often() -> None:
    dials = Dials(0.0, is_reached=False)

    async def tell(dial_back: DialBack) -> None:
        trusted = []
        for _ in range(2000):
            trusted.append(dial_back.meet(PeerId("far")))
            await asyncio.sleep(1.0)
        assert trusted == [True] + [False] * 1999
        dials.is_reached = True
        await asyncio.sleep(MOST_WAIT_S)
        assert not dial_back.meet(PeerId("far"))
        await asyncio.sleep(1.0)
        assert dial_back.meet(PeerId("far")), "it was reached since"
        await asyncio.sleep(1.0)

    said = story(dials, tell)
    waits = [FIRST_WAIT_S, 60.0, 120.0, 240.0, MOST_WAIT_S, MOST_WAIT_S, MOST_WAIT_S]
    assert dials.begun[:8] == [sum(waits[:num]) for num in range(8)]
    assert [what for _, what, _ in said] == ["failed", "doubted"] * 8 + ["reached"] * 2


def test_a_peer_that_moved_is_dialled_soon_but_not_at_each_of_its_claims() -> None:
    dials = Dials(0.0, is_reached=False)

    async def tell(dial_back: DialBack) -> None:
        for _ in range(100):
            dial_back.meet(PeerId("moving"))
            await asyncio.sleep(1.0)
        for _ in range(20):
            dial_back.moved(PeerId("moving"))
            dial_back.meet(PeerId("moving"))
            await asyncio.sleep(1.0)

    story(dials, tell)
    assert dials.begun == [0.0, 30.0, 90.0, *(100.0 + number * MOVED_WAIT_S for number in range(4))]


def test_a_peer_that_left_during_its_dial_is_trusted_when_it_comes_back() -> None:
    dials = Dials(0.5, is_reached=False)
    dials.is_here = False

    async def tell(dial_back: DialBack) -> None:
        for _ in range(2):
            assert dial_back.meet(PeerId("restarted"))
            await asyncio.sleep(5.0)

    assert story(dials, tell) == [(0.5, "failed", "restarted"), (5.5, "failed", "restarted")]


def test_strangers_are_dialled_a_few_at_a_time_and_only_so_many_wait() -> None:
    dials = Dials(0.5, is_reached=True)

    async def tell(dial_back: DialBack) -> None:
        met = [dial_back.meet(PeerId(f"peer {number}")) for number in range(MAX_STRANGERS + 1)]
        assert met == [True] * MAX_STRANGERS + [False]
        await asyncio.sleep(0.1)
        assert dials.most == AT_ONCE
        await asyncio.sleep(100.0)
        assert dial_back.meet(PeerId("the last one")), "there is room again"

    said = story(dials, tell)
    assert dials.most == AT_ONCE
    reached = [peer_id for _, what, peer_id in said if what == "reached"]
    assert reached == [f"peer {number}" for number in range(MAX_STRANGERS)]


def test_nobody_is_dialled_after_the_end() -> None:
    dials = Dials(2.0, is_reached=True)

    async def tell(dial_back: DialBack) -> None:
        dial_back.meet(PeerId("a"))
        await asyncio.sleep(0.1)
        await dial_back.close()
        assert not dial_back.meet(PeerId("b"))
        await asyncio.sleep(10.0)

    assert story(dials, tell) == []
    assert dials.begun == [0.0]
