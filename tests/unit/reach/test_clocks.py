"""Whose clock is right."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from manyhands.base.identity import PeerId
from manyhands.reach.clocks import clock_offset_s, middle_of
from manyhands.reach.messages import ExamineResponse
from manyhands.rpc import Endpoint


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


class Answering:
    """An endpoint that knows seven peers, of which some answer at once and the others never."""

    def __init__(self, clocks: dict[PeerId, float]) -> None:
        self._clocks = clocks

    async def call(self, peer_id: PeerId, *_: Any) -> ExamineResponse:
        if peer_id not in self._clocks:
            await asyncio.Event().wait()
        return ExamineResponse(self._clocks[peer_id], "", 0, "")


async def test_a_majority_of_answers_is_enough_and_silent_peers_are_not_waited_for() -> None:
    peers = [PeerId(f"peer{number}") for number in range(7)]
    endpoint = Answering({peers[0]: 10.0, peers[2]: 100.0, peers[4]: 100.5, peers[6]: 101.0})
    offset_s = await asyncio.wait_for(clock_offset_s(cast(Endpoint, endpoint), lambda: 100.0, peers), 1.0)
    assert offset_s == 0.0
