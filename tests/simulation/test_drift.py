"""Peers whose parameters are changed behind the optimizer's back, in a run of one group."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from manyhands.averaging.sketch import packed
from manyhands.optim.run.drift import BOUND
from manyhands.optim.step.replica import trained_of
from tests.simulation.swarm_of_trainers import Member, Swarm, together
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH_SIZE, BATCH_S, TARGET = 8, 1.0, 128
"""Four peers take 4 s for a step."""
NUM_STEPS = 10
SPOILED_AT = 5  # global step
ELSEWHERE: list[dict[str, Any]] = [{"delay": "gradients"}, {"delay": "optimizer"}, {"offload": True}]

Change = Callable[[list[torch.Tensor]], None]


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.ReLU(), torch.nn.Linear(60, 40))


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.001)


@dataclass
class Run:
    """A swarm; ``change`` is made to the parameters that a peer's optimizer holds, after one of its batches."""

    num_peers: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    change: dict[str, Callable[[Member], None]] = field(default_factory=dict)
    reloaded_at: dict[str, list[int]] = field(default_factory=dict)
    held: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    apart: list[float] = field(default_factory=list)
    swarm: Swarm = field(default_factory=lambda: Swarm(seed=7))

    def go(self, num_steps: int = NUM_STEPS) -> dict[str, Member]:
        for number in range(self.num_peers):
            self.swarm.start(
                f"p{number}", new_model, adamw, lambda member: self._train(member, num_steps),
                **{"target_batch_size": TARGET, "batch_size_per_step": BATCH_SIZE, **self.options},
            )  # fmt: skip
        self.swarm.run()
        return self.swarm.members

    def _train(self, member: Member, num_steps: int) -> None:
        together(self.num_peers, member)
        rng = torch.Generator().manual_seed(int(member.name[1:]))
        at = self.reloaded_at.setdefault(member.name, [])
        while member.optimizer.global_step < num_steps:
            step = member.optimizer.global_step
            inputs = torch.randn(BATCH_SIZE, 40, generator=rng)
            member.step((member.model(inputs) - inputs).square().mean(), BATCH_S)
            member.check_samples()
            if member.optimizer.global_step != step:
                self._note(member)
            if member.optimizer.statistics.parameters_reloaded > len(at):
                at.append(member.optimizer.global_step)
            if member.name in self.change:
                self.change[member.name](member)
        member.optimizer.settle()

    def _note(self, member: Member) -> None:
        flat_N = torch.cat([parameter.detach().flatten() for parameter in member.model.parameters()])
        self.held.setdefault(member.optimizer.global_step, []).append(flat_N)
        if (apart := member.optimizer.statistics.disagreement) is not None:
            self.apart.append(apart)


def parameters_of(member: Member) -> list[torch.Tensor]:
    """Those that its optimizer holds; with ``offload`` they are copies of the model's."""
    return trained_of(member.optimizer.inner)


def once(change: Callable[[Member], None]) -> Callable[[Member], None]:
    done: list[int] = []

    def change_once(member: Member) -> None:
        if not done and member.optimizer.global_step >= SPOILED_AT:
            done.append(member.optimizer.global_step)
            change(member)

    return change_once


@torch.no_grad()
def forget_an_average(member: Member) -> None:
    for parameter in parameters_of(member):
        parameter.mul_(0.97)


@torch.no_grad()
def clamp(member: Member) -> None:
    for parameter in parameters_of(member):
        parameter.clamp_(-0.14, 0.14)


@torch.no_grad()
def flip_a_bit(member: Member) -> None:
    parameters_of(member)[0][3, 5] = 2.0


@torch.no_grad()
def spoil(member: Member) -> None:
    parameters_of(member)[0][3, 5] = torch.nan


@torch.no_grad()
def overflow(member: Member) -> None:
    parameters_of(member)[0][3, 5] = torch.inf


@torch.no_grad()
def cast(member: Member) -> None:
    for parameter in parameters_of(member):
        parameter.copy_(parameter.bfloat16())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("run.drift")]


@pytest.mark.parametrize("change", few_of([forget_an_average, flip_a_bit, clamp, cast, spoil, overflow]))
def test_a_peer_with_other_parameters_loads_those_of_the_majority(
    change: Callable[[Member], None], caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(change={"p2": once(change)})
    members = run.go()
    (at,) = run.reloaded_at["p2"]
    assert at - SPOILED_AT <= 2
    for name, member in members.items():
        counts = member.optimizer.statistics
        assert (counts.states_loaded, counts.parameters_reloaded) == ((1, 1) if name == "p2" else (0, 0))
        assert counts.samples_dropped <= (TARGET if name == "p2" else 0)
        assert counts.rounds_aborted == 0
    for step, held in run.held.items():
        assert step in range(SPOILED_AT + 1, at + 2) or all(torch.equal(one, held[0]) for one in held), step
    assert set(run.apart) == {0.0}, "before the next step they are the same again"
    own = [text for text in warnings(caplog) if text.startswith("The parameters of this peer")]
    assert len(own) == 1, own
    others = [text for text in warnings(caplog) if text not in own]
    assert len(others) <= 3, "each of the others says it once"
    assert all(members["p2"].peer.peer_id in text for text in others)


@pytest.mark.parametrize("options", few_of([{}, *ELSEWHERE]), ids=str)
def test_peers_with_the_same_parameters_do_not_reload(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(options=options)
    members = run.go()
    assert warnings(caplog) == []
    assert len(run.apart) > 3 * NUM_STEPS, "it is told"
    assert set(run.apart) == {0.0}
    assert all(member.optimizer.statistics.states_loaded == 0 for member in members.values())


@pytest.mark.long
@pytest.mark.parametrize("options", few_of(ELSEWHERE), ids=str)
def test_a_peer_with_other_parameters_reloads_also_with_background_steps_and_offload(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(options=options, change={"p2": once(flip_a_bit)})
    members = run.go()
    (at,) = run.reloaded_at["p2"]
    assert at - SPOILED_AT <= 3
    final = [parameters_of(member) for member in members.values()]
    for parameters in final[1:]:
        assert all(map(torch.equal, parameters, final[0]))
    assert all(member.optimizer.statistics.states_loaded == (name == "p2") for name, member in members.items())


@pytest.mark.long
def test_peers_that_differ_by_rounding_do_not_reload(caplog: pytest.LogCaptureFixture) -> None:
    """Each peer but one moves each of its parameters by a unit in the last place after each batch."""
    num_changes = 0

    @torch.no_grad()
    def round_otherwise(member: Member) -> None:
        nonlocal num_changes
        num_changes += 1
        for parameter in parameters_of(member):
            away = torch.where(torch.rand_like(parameter) < 0.5, -torch.inf, torch.inf)
            parameter.copy_(torch.nextafter(parameter, away))

    run = Run(change=dict.fromkeys(("p1", "p2", "p3"), round_otherwise))
    members = run.go()
    assert num_changes >= 3 * NUM_STEPS * TARGET / BATCH_SIZE / 4
    assert warnings(caplog) == []
    assert 0 < max(run.apart) < BOUND / 100
    assert all(member.optimizer.statistics.states_loaded == 0 for member in members.values())


@pytest.mark.long
def test_a_peer_whose_own_code_changes_its_parameters_loads_once_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(change={"p2": clamp})
    members = run.go(num_steps=20)
    assert [member.optimizer.statistics.states_loaded for member in members.values()] == [0, 0, 1, 0]
    own = [text for text in warnings(caplog) if text.startswith("The parameters of this peer")]
    assert len(own) == 2, own
    assert "it loads the majority's state" in own[0]
    assert "although it has loaded the majority's state" in own[1]
    assert len(warnings(caplog)) <= 2 + 3, "each of the others says it once"
    for member in members.values():
        counts = member.optimizer.statistics
        assert counts.samples_dropped <= TARGET
        assert counts.rounds_aborted == 0
    assert max(run.apart) > BOUND


@pytest.mark.long
def test_a_liar_changes_nothing_for_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """It publishes wild numbers, other ones each time, now and then the right ones, and loads nothing itself."""
    rng = random.Random(5)

    def lie(member: Member) -> None:
        store = member.peer.dht.store
        kinds: list[Callable[[bytes], bytes]] = [
            lambda _: packed([rng.gauss(0, 10.0 ** rng.randint(-5, 30)) for _ in range(16)]),
            lambda _: packed([float("nan")] * 16),
            lambda _: b"",
            lambda _: packed([1.0]),
            lambda truth: truth,
        ]

        async def store_a_lie(key: str, value: Any, *more: Any, **options: Any) -> int:
            if isinstance(value, dict) and "sketch" in value:
                value = value | {"sketch": rng.choice(kinds)(value["sketch"])}
            return await store(key, value, *more, **options)

        member.peer.dht.store = store_a_lie  # type: ignore[method-assign]

    run = Run(change={"p3": once(lie)})
    members = run.go(num_steps=40)
    for name, member in members.items():
        counts = member.optimizer.statistics
        assert counts.states_loaded == counts.samples_dropped == counts.rounds_aborted == 0
        assert name == "p3" or counts.samples_used == counts.samples_computed - member.optimizer.samples_accumulated
    for held in run.held.values():
        assert all(torch.equal(one, held[0]) for one in held)
    assert len(warnings(caplog)) == 3, "each of the others says it once"
    assert all(members["p3"].peer.peer_id in text for text in warnings(caplog))


@pytest.mark.long
def test_a_peer_that_missed_steps_does_not_reload_where_all_change_their_parameters_alike(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it loads has been changed already, what the others have told of has not."""

    def clamp_and_sleep(member: Member) -> None:
        clamp(member)
        sleep(member)

    sleep = once(lambda member: member.peer.sleep(40.0))
    run = Run(change=dict.fromkeys(("p0", "p1", "p3"), clamp) | {"p2": clamp_and_sleep})
    members = run.go(num_steps=30)
    assert members["p2"].optimizer.statistics.states_loaded >= 1
    assert warnings(caplog) == []
    assert all(member.optimizer.statistics.parameters_reloaded == 0 for member in members.values())


def test_two_peers_that_differ_warn_and_do_not_reload(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(num_peers=2, change={"p1": once(forget_an_average)})
    members = run.go()
    assert all(member.optimizer.statistics.states_loaded == 0 for member in members.values())
    assert all(member.optimizer.statistics.samples_dropped == 0 for member in members.values())
    assert len(warnings(caplog)) == 2  # each peer says it once
    assert all("it is unknown which are right" in text for text in warnings(caplog))
    assert run.apart[-1] > BOUND
