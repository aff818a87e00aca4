"""Rounds that are planned ahead of time."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import pytest
import torch

from manyhands.averaging.round_trigger import RoundTrigger, Stage
from manyhands.base.errors import RoundAborted
from manyhands.runtime import TaskOwner
from tests.swarm import averagers

SOON_S = 5.0


@pytest.fixture
async def tasks() -> AsyncIterator[TaskOwner]:
    owner = TaskOwner("test")
    yield owner
    await owner.close()


class Attempt:
    """Counts how often it was begun, and lasts until it is let go."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.go_on = asyncio.Event()

    async def __call__(self) -> str:
        self.num_begun += 1
        await self.go_on.wait()
        return "the mean"


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("is_allowed_first", [False, True])
async def test_it_begins_once_both_the_time_and_the_values_are_there(tasks: TaskOwner, is_allowed_first: bool) -> None:
    trigger: RoundTrigger[str] = RoundTrigger(tasks)
    attempt = Attempt()
    attempt.go_on.set()
    steps = [lambda: trigger.schedule(now()), lambda: trigger.allow(attempt)]
    for step in steps[:: -1 if is_allowed_first else 1]:
        assert attempt.num_begun == 0
        step()
        step()
    assert await trigger.result(SOON_S) == "the mean"
    assert trigger.stage is Stage.DONE
    for step in (*steps, trigger.cancel):
        step()
    assert await trigger.result(SOON_S) == "the mean"
    assert attempt.num_begun == 1


async def test_the_time_may_be_moved_until_it_has_come(tasks: TaskOwner) -> None:
    trigger: RoundTrigger[str] = RoundTrigger(tasks)
    attempt = Attempt()
    attempt.go_on.set()
    trigger.allow(attempt)
    trigger.schedule(now() + 1000.0)
    trigger.schedule(now())
    assert await trigger.result(SOON_S) == "the mean"


async def test_called_off_before_it_begins_it_never_does(tasks: TaskOwner) -> None:
    trigger: RoundTrigger[str] = RoundTrigger(tasks)
    attempt = Attempt()
    trigger.schedule(now())
    trigger.cancel()
    trigger.cancel()
    trigger.allow(attempt)
    with pytest.raises(RoundAborted, match="called the round off"):
        await trigger.result(SOON_S)
    assert (attempt.num_begun, trigger.stage) == (0, Stage.CANCELLED)


class Searching:
    """Notes when a search begins and ends."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def __call__(self) -> None:
        self.events.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("ended")


async def test_the_group_is_looked_for_from_its_time_on_until_the_values_are_there(tasks: TaskOwner) -> None:
    search, attempt = Searching(), Attempt()
    attempt.go_on.set()
    trigger: RoundTrigger[str] = RoundTrigger(tasks, search)
    trigger.schedule(now() + 1000.0)
    await asyncio.sleep(0.0)
    assert trigger.stage is Stage.PLANNED
    for _ in range(3):
        trigger.schedule(now())
        await asyncio.sleep(0.01)
    assert (trigger.stage, search.events, attempt.num_begun) == (Stage.SEARCHING, ["began"], 0)
    for _ in range(2):
        trigger.allow(attempt)
    assert await trigger.result(SOON_S) == "the mean"
    assert (search.events, attempt.num_begun) == (["began", "ended"], 1)


async def test_who_calls_off_looks_for_nobody_any_more(tasks: TaskOwner) -> None:
    search = Searching()
    trigger: RoundTrigger[str] = RoundTrigger(tasks, search)
    trigger.schedule(now())
    await asyncio.sleep(0.01)
    for _ in range(2):
        trigger.cancel()
    await trigger.over()
    assert (trigger.stage, search.events) == (Stage.CANCELLED, ["began", "ended"])
    with pytest.raises(RoundAborted, match="called the round off"):
        await trigger.result(SOON_S)


async def test_whatever_the_attempt_raises_is_the_result(tasks: TaskOwner) -> None:
    trigger: RoundTrigger[str] = RoundTrigger(tasks)

    async def fail() -> str:
        raise RoundAborted("nobody came")

    trigger.allow(fail)
    trigger.schedule(now())
    with pytest.raises(RoundAborted, match="nobody came"):
        await trigger.result(SOON_S)


async def test_when_one_calls_off_the_others_go_on(tasks: TaskOwner) -> None:
    async with averagers(3) as members:
        triggers = []
        for number, (runner, _, _) in enumerate(members):
            trigger: RoundTrigger[object] = RoundTrigger(tasks)
            trigger.allow(lambda runner=runner, number=number: runner.average(torch.full((5,), float(number)), 1.0))
            triggers.append(trigger)
        triggers[2].cancel()
        for _, roster, _ in members[:2]:
            roster.others.pop(members[2][2].peer_id)
        for trigger in triggers:
            trigger.schedule(now())
        results = await asyncio.gather(*(trigger.result(SOON_S) for trigger in triggers), return_exceptions=True)
    assert isinstance(results[2], RoundAborted)
    assert [result.num_members for result in results[:2]] == [2, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize("is_planned_ahead", [False, True])
async def test_what_it_came_to_is_gone_with_it(tasks: TaskOwner, is_planned_ahead: bool) -> None:
    """Not when the collector comes: the mean may be as large as the model."""

    async def attempt() -> torch.Tensor:
        return torch.ones(3)

    async def search() -> None:
        await asyncio.sleep(60.0)

    gc.collect()
    gc.disable()
    try:
        trigger: RoundTrigger[torch.Tensor] = RoundTrigger(tasks, search if is_planned_ahead else None)
        trigger.schedule(now())
        await asyncio.sleep(0.001)
        trigger.allow(attempt)
        mean = weakref.ref(await trigger.result(SOON_S))
        trigger.cancel()
        await trigger.over()
        del trigger
        assert mean() is None
    finally:
        gc.enable()
