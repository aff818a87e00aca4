"""Whose clock is right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from manyhands.base.deadline import time_limit
from manyhands.base.identity import PeerId
from manyhands.reach.clocks import CLOCK_TIMEOUT_S, clock_offset_s, middle_of
from manyhands.reach.messages import EXAMINE, ExamineRequest, ExamineResponse
from tests.network import endpoints


@pytest.mark.parametrize(
    ("offsets", "middle"),
    [
        ([3600.0], 3600.0),
        ([0.1, -3600.0, 0.2], 0.1),
        ([0.1, 3600.0], 0.1),
        ([-3600.0, -0.1], -0.1),
        ([3600.0, 3601.0], 3600.0),
        ([3600.0, 0.1, 3601.0], 3600.0),
    ],
)
def test_a_clock_is_wrong_only_if_more_than_half_of_the_others_say_so(offsets: list[float], middle: float) -> None:
    assert middle_of(offsets) == middle


async def test_a_majority_of_answers_is_enough_and_silent_peers_are_not_waited_for() -> None:
    async def say_nothing(remote: PeerId, request: ExamineRequest) -> ExamineResponse:
        await asyncio.Event().wait()
        raise AssertionError("nobody waits for this answer")

    def say(wall_time_s: float) -> Callable[[PeerId, ExamineRequest], ExamineResponse]:
        return lambda remote, request: ExamineResponse(wall_time_s, "", 0, "")

    async with endpoints(8) as (own, *others):
        for other, handler in zip(others, [say(10.0), say_nothing, say(100.0), say_nothing] * 2, strict=False):
            other.handle(EXAMINE, handler)
        peers = [other.peer_id for other in others]
        async with time_limit(CLOCK_TIMEOUT_S / 2, "for a majority of the clocks"):
            assert await clock_offset_s(own, lambda: 100.0, peers) == 0.0
