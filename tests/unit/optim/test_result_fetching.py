"""Which peers are asked for a step that this one lacks, and which step counts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position, RoundManifest
from manyhands.averaging.roster import Roster, next_place
from manyhands.base.errors import ProtocolViolation, RoundAborted, Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.run import step_rounds
from manyhands.optim.run.step_rounds import MAX_HOLDERS, StepRounds
from manyhands.optim.state.catching_up import MissedStep

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
        self.passed_over: list[PeerId] = []
        self.rounds: Any = StepRounds.__new__(StepRounds)
        self.rounds.own_id, self.rounds.keeper = BOB, SimpleNamespace(endpoint=None, run_id="run")
        self.rounds.config = AveragingConfig()
        self.rounds.local = SimpleNamespace(position=HERE, roster=Roster())
        self.rounds.tracker = SimpleNamespace(shun=lambda peer_id, _: self.shunned.append(peer_id))
        self.rounds.rounds = SimpleNamespace(matchmaker=SimpleNamespace(pass_over=self.passed_over.append))
        monkeypatch.setattr(step_rounds, "fetch_step", self._fetch)

    async def _fetch(self, endpoint: Any, run_id: str, peer_id: PeerId, position: Position, _: Any) -> Any:
        assert position == HERE
        self.asked.append(peer_id)
        answer = self.kept.get(peer_id)
        if isinstance(answer, Exception):
            raise answer
        return None if answer is None else MissedStep(answer, torch.zeros(1))


async def test_the_first_peer_that_has_kept_the_step_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    bob = Lacking(monkeypatch, ann=Unavailable("gone"), dave=COMMITTED, eve=COMMITTED)
    step = await bob.rounds.step_towards(END, [ANN, CAROL, DAVE, PeerId("eve")])
    assert step.manifest == COMMITTED
    assert bob.asked == [ANN, CAROL, DAVE]
    assert bob.shunned == []


async def test_where_nobody_has_kept_it_a_few_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    bob = Lacking(monkeypatch)
    others = [PeerId(f"peer {number}") for number in range(100)]
    assert await bob.rounds.step_towards(END, others) is None
    assert bob.asked == others[:MAX_HOLDERS]


async def test_a_peer_that_trickles_the_step_holds_this_one_up_no_longer_than_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bob = Lacking(monkeypatch)

    async def trickle(*_: object) -> None:
        await asyncio.sleep(3600.0)

    monkeypatch.setattr(step_rounds, "fetch_step", trickle)
    bob.rounds.config = AveragingConfig(matchmaking_time_s=0.01, averaging_timeout_s=0.05)
    assert await asyncio.wait_for(bob.rounds.step_towards(END, [ANN]), 10.0) is None


async def test_a_step_that_leads_elsewhere_than_the_run_is_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    bob = Lacking(monkeypatch, ann=msgspec.structs.replace(COMMITTED, digest=b"another"))
    assert await bob.rounds.step_towards(END, [ANN]) is None
    assert await bob.rounds.step_towards(Position(1, b"there"), [ANN]) is None, "the run is not ahead"
    assert await bob.rounds.step_towards(Position(7, b"ahead"), [ANN]) is not None, "its lineage will tell"


async def test_a_peer_that_sends_what_was_not_committed_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    bob = Lacking(
        monkeypatch, ann=ProtocolViolation(ANN, "sent means that differ from what was committed"), carol=COMMITTED
    )
    assert await bob.rounds.step_towards(END, [ANN, CAROL]) is not None
    assert bob.shunned == [ANN]


async def test_a_result_is_not_fetched_from_its_leader_which_is_passed_over_if_nobody_else_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It could commit a digest of its own, and hand out the means for it."""
    monkeypatch.setattr(step_rounds, "TWO_ANSWERS_S", 0.01)
    bob = Lacking(monkeypatch, ann=COMMITTED)
    with pytest.raises(RoundAborted, match="this peer does not have the result"):
        await bob.rounds.lacking_means(SimpleNamespace(manifest=COMMITTED, blamed=[DAVE], reason=""), END)
    assert bob.asked == [CAROL]
    assert bob.passed_over == [ANN]
