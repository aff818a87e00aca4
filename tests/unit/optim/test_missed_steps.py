"""Which peers are asked for a step that this one lacks, and which step counts."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch

from manyhands.averaging.messages import Position, RoundManifest
from manyhands.averaging.roster import Roster, next_place
from manyhands.base.errors import ProtocolViolation, Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.state import catching_up
from manyhands.optim.state.catching_up import MAX_HOLDERS, MissedStep, step_towards

ANN, BOB, CAROL, DAVE = (PeerId(name) for name in ("ann", "bob", "carol", "dave"))
HERE = Position(1, b"here")
COMMITTED = RoundManifest(b"group", HERE, 0, [ANN, BOB, CAROL, DAVE], [1.0] * 4, [0] * 4, b"digest of the leader")
END, _, _ = next_place(HERE, Roster(), COMMITTED)


class Lacking:
    """Bob, who lacks a step.

    Attributes:
        kept: what each peer answers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **kept: RoundManifest | Exception) -> None:
        self.kept = kept
        self.asked: list[PeerId] = []
        self.shunned: list[PeerId] = []
        monkeypatch.setattr(catching_up, "fetch_step", self._fetch)

    async def _fetch(self, endpoint: Any, run_id: str, peer_id: PeerId, position: Position, _: Any) -> Any:
        assert position == HERE
        self.asked.append(peer_id)
        answer = self.kept.get(peer_id)
        if isinstance(answer, Exception):
            raise answer
        return None if answer is None else MissedStep(answer, torch.zeros(1))

    async def step_towards(self, goal: Position, holders: list[PeerId], timeout_s: float = 60.0) -> MissedStep | None:
        endpoint: Any = None
        plan_of_code: Any = None
        return await step_towards(
            endpoint, "run", HERE, Roster(), goal, holders, plan_of_code,
            timeout_s=timeout_s, on_violation=lambda peer_id, _: self.shunned.append(peer_id),
        )  # fmt: skip


async def test_the_first_peer_that_has_kept_the_step_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    bob = Lacking(monkeypatch, ann=Unavailable("gone"), dave=COMMITTED, eve=COMMITTED)
    step = await bob.step_towards(END, [ANN, CAROL, DAVE, PeerId("eve")])
    assert step is not None
    assert step.manifest == COMMITTED
    assert bob.asked == [ANN, CAROL, DAVE]
    assert bob.shunned == []


async def test_where_nobody_has_kept_it_a_few_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    bob = Lacking(monkeypatch)
    others = [PeerId(f"peer {number}") for number in range(100)]
    assert await bob.step_towards(END, others) is None
    assert bob.asked == others[:MAX_HOLDERS]


async def test_a_peer_that_trickles_the_step_holds_this_one_up_no_longer_than_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bob = Lacking(monkeypatch)

    async def trickle(*_: object) -> None:
        await asyncio.sleep(3600.0)

    monkeypatch.setattr(catching_up, "fetch_step", trickle)
    assert await asyncio.wait_for(bob.step_towards(END, [ANN], timeout_s=0.05), 10.0) is None


async def test_a_step_that_leads_elsewhere_than_the_run_is_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    bob = Lacking(monkeypatch, ann=msgspec.structs.replace(COMMITTED, digest=b"another"))
    assert await bob.step_towards(END, [ANN]) is None
    assert await bob.step_towards(Position(1, b"there"), [ANN]) is None, "the run is not ahead"
    assert await bob.step_towards(Position(7, b"ahead"), [ANN]) is not None, "its lineage will tell"


async def test_a_peer_that_sends_what_was_not_committed_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    bob = Lacking(
        monkeypatch, ann=ProtocolViolation(ANN, "sent means that differ from what was committed"), carol=COMMITTED
    )
    assert await bob.step_towards(END, [ANN, CAROL]) is not None
    assert bob.shunned == [ANN]
