"""Whom a peer asks for the result of its round that it does not hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.averaging.messages import Position, RoundManifest
from manyhands.base.errors import RoundAborted
from manyhands.base.identity import PeerId
from manyhands.optim.run.step_rounds import StepRounds

ANN, BOB, CAROL, DAVE = (PeerId(name) for name in ("ann", "bob", "carol", "dave"))


async def test_the_leader_alone_makes_no_result_and_is_passed_over_if_nobody_else_holds_it() -> None:
    """It could commit a digest of its own, and hand out the means for it."""
    asked: list[PeerId] = []
    passed_over: list[PeerId] = []

    async def fetch(manifest: RoundManifest, holders: list[PeerId], plan_of_code: Any) -> None:
        asked.extend(holders)

    rounds: Any = StepRounds.__new__(StepRounds)
    rounds.own_id, rounds.keeper = BOB, SimpleNamespace(fetch=fetch)
    rounds.rounds = SimpleNamespace(matchmaker=SimpleNamespace(pass_over=passed_over.append))
    manifest = RoundManifest(
        b"group", Position(1, b""), 0, [ANN, BOB, CAROL, DAVE], [1.0] * 4, [0] * 4, b"digest of the leader"
    )
    with pytest.raises(RoundAborted, match="this peer does not have the result"):
        await rounds._fetch(SimpleNamespace(manifest=manifest, blamed=[DAVE], reason=""))
    assert asked == [CAROL]
    assert passed_over == [ANN]
