"""When the group of a step is looked for before its target is reached."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.averaging.messages import Position
from manyhands.optim.run.step_rounds import AHEAD_S, LookAhead
from manyhands.runtime import TaskOwner

HERE, NEXT = Position(1, b"here"), Position(2, b"next")


class Peers:
    """What a peer knows of the others, and its rounds, which note when a search begins and ends."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.own = SimpleNamespace(position=HERE)
        self.left_s = 1000.0
        self.outlook = SimpleNamespace(num_peers=2)
        self.target_batch_size = 64
        self.is_called = self.is_without_leader = False
        self.on_called_ahead: list[Callable[[], None]] = []

    def lacks_leader(self) -> bool:
        return self.is_without_leader

    def seconds_until(self, samples: int) -> float:
        return self.left_s - (self.target_batch_size - samples)  # at a sample a second

    async def hold_place(self) -> None:
        self.events.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("ended")


@pytest.fixture
async def tasks() -> AsyncIterator[TaskOwner]:
    owner = TaskOwner("test")
    yield owner
    await owner.close()


def made(peers: Any, tasks: TaskOwner, lead: int | None = None) -> LookAhead:
    return LookAhead(peers, peers, tasks, lead)


async def after_planning(look_ahead: LookAhead, times: int = 3) -> None:
    for _ in range(times):
        look_ahead.plan()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("lead", "near_s"), [(None, AHEAD_S), (16, 16.0)])
async def test_it_begins_once_when_the_target_is_near(tasks: TaskOwner, lead: int | None, near_s: float) -> None:
    peers = Peers()
    look_ahead = made(peers, tasks, lead)
    for peers.left_s in (math.inf, 1000.0, near_s + 10.0):
        await after_planning(look_ahead)
        assert peers.events == []
    peers.left_s = near_s
    await after_planning(look_ahead)
    assert peers.events == ["began"]


async def test_it_does_not_begin_alone_nor_without_a_peer_that_can_lead(tasks: TaskOwner) -> None:
    peers = Peers()
    peers.left_s, peers.is_without_leader = 0.0, True
    look_ahead = made(peers, tasks)
    await after_planning(look_ahead)
    peers.is_without_leader, peers.outlook.num_peers = False, 1
    await after_planning(look_ahead)
    assert peers.events == []
    peers.outlook.num_peers = 2
    await after_planning(look_ahead)
    assert peers.events == ["began"]


async def test_it_begins_when_another_peer_does_unless_the_user_wants_none(tasks: TaskOwner) -> None:
    peers, alone = Peers(), Peers()
    made(peers, tasks)
    await after_planning(made(alone, tasks, 0))
    for one in (peers, alone):
        one.left_s = 0.0
        one.on_called_ahead[0]()
    await asyncio.sleep(0.01)
    assert (peers.events, alone.events) == (["began"], [])


async def test_an_attempt_ends_it_and_none_begins_before_that_has_failed_or_its_step_is_made(tasks: TaskOwner) -> None:
    peers = Peers()
    peers.left_s = 0.0
    look_ahead = made(peers, tasks)
    await after_planning(look_ahead)
    await look_ahead.end()
    assert peers.events == ["began", "ended"]
    await after_planning(look_ahead)
    peers.on_called_ahead[0]()
    assert peers.events == ["began", "ended"]
    look_ahead.resume()
    await after_planning(look_ahead)
    await look_ahead.end()
    peers.own.position = NEXT
    await after_planning(look_ahead)
    assert peers.events == ["began", "ended"] * 2 + ["began"]


async def test_one_for_a_position_that_this_peer_has_left_ends(tasks: TaskOwner) -> None:
    peers = Peers()
    peers.left_s = 0.0
    look_ahead = made(peers, tasks)
    await after_planning(look_ahead)
    peers.own.position, peers.left_s = NEXT, math.inf
    await after_planning(look_ahead)
    assert peers.events == ["began", "ended"]
