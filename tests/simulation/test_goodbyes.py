"""A trainer beside others that leave, or that are there and do not come."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from manyhands.averaging.messages import Position
from manyhands.averaging.timing import TWO_DIALS_S
from manyhands.base.identity import PeerId
from manyhands.optim.run.contacts import Contacts, HereIAm
from manyhands.rpc import Endpoint
from manyhands.testing import at
from tests.simulation.swarm_of_trainers import Member, Swarm, together

pytestmark = pytest.mark.usefixtures("one_thread")

LEAVES_S = 21.35
"""The second peer computes no more. With its samples the target is all but reached."""
GONE_S = LEAVES_S + 4.0


@pytest.mark.long
@pytest.mark.parametrize("says_goodbye", [False, True])
def test_a_goodbye_is_no_warning_and_a_peer_that_vanishes_is_one(
    says_goodbye: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "manyhands.optim")
    swarm = Swarm(seed=3)
    swarm.start_coordinator()

    def train(member: Member) -> None:
        while member.peer.time() < (LEAVES_S if member.name == "other" else 220.0):
            member.step(member.model(torch.randn(16, 4)).square().mean(), 0.4)
        if member.name == "other":
            member.peer.sleep(GONE_S - member.peer.time())
            member.peer.run(member.peer.presence.stop(), 10.0, "leaving")

    for name, begins_s in (("one", 1.0), ("other", 1.5)):
        swarm.start(
            name, lambda: torch.nn.Linear(4, 2), lambda model: torch.optim.SGD(model.parameters(), lr=0.01), train,
            begins_s=begins_s, target_batch_size=256, batch_size_per_step=16,
        )  # fmt: skip
    if not says_goodbye:
        swarm.world.schedule(at(GONE_S - 0.5).kill("other"), at(GONE_S).call(lambda: swarm.done.add("other")))
    swarm.run()
    for said in ("Skipped averaging: ", "no other peer of the run has been seen for "):
        levels = {record.levelname for record in caplog.records if record.message.startswith(said)}
        assert levels == ({"INFO"} if says_goodbye else {"WARNING"}), said


def test_a_peer_that_does_not_call_step_is_told_of_without_a_flood(caplog: pytest.LogCaptureFixture) -> None:
    """A notebook between two cells, say: its records go on, so the other waits; it once logged each of its batches."""
    caplog.set_level(logging.INFO, "manyhands.optim")
    swarm = Swarm(seed=1)
    swarm.start_coordinator()
    ends_s = 90.0

    def train(member: Member) -> None:
        if member.name == "idle":
            member.peer.sleep(ends_s - member.peer.time())
        while member.peer.time() < ends_s:
            member.step(member.model(torch.randn(4, 4)).square().mean(), 0.1)

    for name, begins_s in (("one", 1.0), ("idle", 5.0)):
        swarm.start(
            name, lambda: torch.nn.Linear(4, 2), lambda model: torch.optim.SGD(model.parameters(), lr=0.01), train,
            begins_s=begins_s, target_batch_size=256, batch_size_per_step=4,
        )  # fmt: skip
    swarm.run()
    counts = swarm.members["one"].optimizer.statistics
    assert counts.rounds_aborted >= 5
    assert counts.samples_computed > 0.7 * 40 * (ends_s - 1.0), "it waits less each time"
    skipped = [record.message for record in caplog.records if record.message.startswith("Skipped averaging: ")]
    advice = [record.message for record in caplog.records if "attempts failed in a row" in record.message]
    assert len(skipped) <= 10
    assert 1 < len(advice) <= 10
    assert "One of them may no longer call step()" in advice[0]


@pytest.mark.long
def test_a_peer_that_calls_step_no_more_holds_the_other_up_for_some_minutes_and_may_come_back() -> None:
    swarm = Swarm(seed=2)
    swarm.start_coordinator()
    steps: dict[str, int] = {}

    def train_until(member: Member, time_s: float) -> None:
        while member.peer.time() < time_s:
            member.step(member.model(torch.randn(4, 4)).square().mean(), 0.5)

    def train(member: Member) -> None:
        if member.name == "idle":
            train_until(member, 40.0)
            member.peer.sleep(500.0 - member.peer.time())
        else:
            train_until(member, 300.0)
            steps["held up"] = member.optimizer.global_step
            train_until(member, 480.0)
            steps["alone"] = member.optimizer.global_step
        train_until(member, 600.0)

    for name, begins_s in (("one", 1.0), ("idle", 5.0)):
        swarm.start(
            name, lambda: torch.nn.Linear(4, 2), lambda model: torch.optim.SGD(model.parameters(), lr=0.01), train,
            begins_s=begins_s, target_batch_size=64, batch_size_per_step=4,
        )  # fmt: skip
    swarm.run(1000.0)
    one, other = (swarm.members[name].optimizer for name in ("one", "idle"))
    assert steps["alone"] >= steps["held up"] + 10
    assert one.last_round is not None
    assert len(one.last_round.members) == 2
    assert abs(one.global_step - other.global_step) <= 1


def trains_alone(swarm: Swarm, num_steps: int, *, freezes: bool) -> float:
    """Run three trainers, of which one comes no more and one leaves; the seconds that the last one then takes.

    Who comes no more sleeps, and its machine answers, or its machine freezes.
    """
    seconds: list[float] = []

    def train_until(member: Member, step: int) -> None:
        while member.optimizer.global_step < step:
            member.step(member.model(torch.randn(4, 4)).square().mean(), 0.3)

    def train(member: Member) -> None:
        together(3, member)
        train_until(member, 1)
        if member.name != "sleeps":
            train_until(member, 4)
        if member.name == "leaves":
            member.optimizer.close()
        elif member.name == "trains":
            if freezes:
                swarm.world.freeze("sleeps")
                swarm.done.add("sleeps")
            began = member.peer.time()
            train_until(member, 4 + num_steps)
            seconds.append(member.peer.time() - began)
        else:
            member.peer.sleep(400.0)

    for name in ("trains", "sleeps", "leaves"):
        swarm.start(
            name, lambda: torch.nn.Linear(4, 2), lambda model: torch.optim.SGD(model.parameters(), lr=0.01), train,
            target_batch_size=24, batch_size_per_step=2,
        )  # fmt: skip
    swarm.run(1000.0)
    return seconds[0]


def test_a_sleeping_peer_that_is_behind_does_not_stop_the_last_trainer(caplog: pytest.LogCaptureFixture) -> None:
    """The DHT shows it, and it answers."""
    assert trains_alone(Swarm(), 3, freezes=False) < 15.0, "4 s each"
    assert not [record for record in caplog.records if record.message.startswith("The DHT shows no record")]


def test_a_peer_on_a_frozen_machine_is_not_asked_before_each_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, asked = Swarm(), list[float]()
    ask = Contacts.any_answers

    async def count(contacts: Contacts, peer_ids: Sequence[PeerId]) -> bool:
        asked.append(swarm.world.loop.time())
        return await ask(contacts, peer_ids)

    monkeypatch.setattr(Contacts, "any_answers", count)
    trains_alone(swarm, 10, freezes=True)
    assert len(asked) > 1
    assert all(later - earlier >= TWO_DIALS_S for earlier, later in itertools.pairwise(asked)), asked


def test_a_peer_that_is_closed_in_a_call_of_step_calls_nobody_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may close it while ``step()`` decides what to do."""

    made: list[Contacts] = []
    init = Contacts.__init__

    def noted(contacts: Contacts, *arguments: Any, **options: Any) -> None:
        init(contacts, *arguments, **options)
        made.append(contacts)

    monkeypatch.setattr(Contacts, "__init__", noted)

    def train(member: Member) -> None:
        member.optimizer.close()
        (contacts,) = made
        contacts.tell([member.peer.peer_id])
        contacts.look_for_the_dead()

    swarm = Swarm()
    swarm.start(
        "one", lambda: torch.nn.Linear(4, 2), lambda model: torch.optim.SGD(model.parameters(), lr=0.01), train,
        target_batch_size=124, batch_size_per_step=4,
    )  # fmt: skip
    swarm.run()


def test_a_peer_that_is_asked_again_and_again_tells_its_accumulated_samples_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here to one that computes nothing, by one that has all but reached the target and is called again and again."""
    told: Counter[tuple[PeerId, Position, int]] = Counter()
    call = Endpoint.call

    async def count(own: Endpoint, peer_id: PeerId, method: Any, request: Any, timeout_s: float = 5.0) -> Any:
        if isinstance(request, HereIAm):
            told[own.peer_id, request.record.position, request.record.samples] += 1
        return await call(own, peer_id, method, request, timeout_s)

    monkeypatch.setattr(Endpoint, "call", count)

    def train(member: Member) -> None:
        together(2, member)
        for _ in range(15):
            member.step(member.model(torch.randn(4, 4)).square().mean(), 0.5)
        for _ in range(20):
            member.peer.sleep(0.1)
            member.optimizer.step(batch_size=0)

    swarm = Swarm()
    for name in ("one", "other"):
        swarm.start(
            name, lambda: torch.nn.Linear(4, 2), lambda model: torch.optim.SGD(model.parameters(), lr=0.01), train,
            target_batch_size=124, batch_size_per_step=4,
        )  # fmt: skip
    swarm.run()
    assert told
    assert max(told.values()) == 1, told
