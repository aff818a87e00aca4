"""The learning rate goes by the global step: whatever else changes it is refused, and peers that differ are named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from manyhands.base.errors import ConfigError, ManifestMismatch
from manyhands.optim.manifest import LOOKED_AT
from tests.simulation.swarm_of_trainers import WAIT_S, Member, Swarm, together
from tests.simulation.test_drop_in import adam, alone, loss_of, new_model
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

WAYS = [{}, {"delay": "gradients"}, {"offload": True}, {"delay": "optimizer"}]


def name_of(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values())) or "sync"


def cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)


def warm_up(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)


# changed by something else


@pytest.mark.parametrize("options", few_of(WAYS, 2), ids=name_of)
@pytest.mark.parametrize("is_of_the_inner", [False, True], ids=["of ours", "of the inner"])
@pytest.mark.parametrize("make", [cosine, warm_up])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_in_the_loop_is_refused_at_the_next_step(
    make: Callable[[Any], lr_scheduler.LRScheduler], is_of_the_inner: bool, options: dict[str, Any]
) -> None:
    """It would go by this peer's calls of step(), of which each peer has another number."""

    def train(member: Member) -> None:
        optimizer = member.optimizer
        scheduler = make(optimizer.inner if is_of_the_inner else optimizer)

        def loop() -> None:
            for number in range(20):
                member.step(loss_of(member.model, number))
                scheduler.step()

        with pytest.raises(ConfigError) as caught:
            loop()
        says = str(caught.value)
        assert f"the option 'lr' was {0.05!r} and is {optimizer.param_groups[0]['lr']!r} now" in says or is_of_the_inner
        assert "scheduler=lambda inner: CosineAnnealingLR(inner, " in says
        assert "call no scheduler.step() in the loop" in says
        assert "trainer.add_callback(manyhands.training.transformers.CollaborativeCallback(trainer))" in says
        assert optimizer.statistics.samples_computed <= 8, "it is noticed before more is computed"
        assert optimizer.global_step <= 2

    alone(train, **options)


@pytest.mark.parametrize("options", few_of(WAYS, 2), ids=name_of)
@pytest.mark.parametrize(("name", "value"), [("lr", 0.01), ("weight_decay", 0.5), ("betas", (0.8, 0.9))])
def test_options_set_by_hand_are_refused_and_nothing_was_counted(
    name: str, value: object, options: dict[str, Any]
) -> None:
    def train(member: Member) -> None:
        optimizer = member.optimizer
        member.step(loss_of(member.model, 0))
        optimizer.settle()
        group = optimizer.param_groups[0]
        before, counted = group[name], optimizer.statistics.samples_computed
        group[name] = value
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"the option '{name}' was "):
                optimizer.step()
        assert optimizer.statistics.samples_computed == counted
        group[name] = before
        member.step(loss_of(member.model, 1))
        assert optimizer.statistics.samples_computed == counted + 4

    alone(train, **options)


def test_of_several_groups_the_one_that_was_changed_is_named() -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        return torch.optim.SGD([{"params": [first]}, {"params": rest, "lr": 0.2}], lr=0.1)

    def train(member: Member) -> None:
        member.optimizer.param_groups[1]["lr"] = 0.3
        with pytest.raises(ConfigError, match=r"'lr' of parameter group 1 was 0\.2 and is 0\.3 now"):
            member.optimizer.step()

    alone(train, make)


@pytest.mark.parametrize("options", few_of(WAYS, 2), ids=name_of)
def test_a_schedule_that_changes_nothing_may_be_stepped_and_shows_the_rate(options: dict[str, Any]) -> None:
    """As loops need that call one in any case."""

    def train(member: Member) -> None:
        shown = lr_scheduler.MultiplicativeLR(member.optimizer, lambda _: 1.0)
        for number in range(4):
            member.step(loss_of(member.model, number))
            member.optimizer.settle()
            shown.step()
            assert shown.get_last_lr() == [pytest.approx(0.05 * 0.5 ** (number + 1))]
        assert member.optimizer.global_step == 4

    alone(train, scheduler=lambda inner: lr_scheduler.ExponentialLR(inner, 0.5), **options)


def test_an_optimizer_may_change_its_own_options() -> None:
    """As optimizers do that find their learning rate by themselves."""

    class Slowing(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            self.param_groups[0]["lr"] *= 0.5
            return result

    def train(member: Member) -> None:
        for number in range(3):
            member.step(loss_of(member.model, number))
        assert member.optimizer.param_groups[0]["lr"] == 0.05 / 8

    alone(train, lambda model: Slowing(model.parameters(), lr=0.05))


def test_a_checkpoint_may_have_another_learning_rate() -> None:
    def train(member: Member) -> None:
        member.step(loss_of(member.model, 0))
        saved = member.optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 0.01
        member.optimizer.load_state_dict(saved)
        member.step(loss_of(member.model, 1))
        assert member.optimizer.param_groups[0]["lr"] == 0.01
        assert member.optimizer.global_step == 2

    alone(train)


# other peers


def swarm_with(*schedules: Callable[[Any], Any] | None, num_steps: int = 6) -> Swarm:
    swarm = Swarm()

    def train(member: Member) -> None:
        together(len(schedules), member)
        for number in range(num_steps):
            while member.optimizer.global_step <= number:
                if member.optimizer.samples_accumulated:
                    member.peer.sleep(WAIT_S)
                    member.optimizer.step(batch_size=0)
                else:  # again if they were dropped with a state that it has loaded
                    member.step(loss_of(member.model, number))

    for number, schedule in enumerate(schedules):
        swarm.start(
            f"p{number}", new_model, adam, train, scheduler=schedule,
            target_batch_size=4 * len(schedules), batch_size_per_step=4,
        )  # fmt: skip
    return swarm


def falling(divisor: float) -> Callable[[Any], Any]:
    """A schedule that is the same for all where peers compare the learning rates when they join."""

    def factor(step: int) -> float:
        return 1 / (1 + step / (10.0 if step in LOOKED_AT else divisor))

    return lambda inner: lr_scheduler.LambdaLR(inner, factor)


def test_a_peer_whose_function_gives_other_learning_rates_cannot_join() -> None:
    swarm = swarm_with(*(lambda inner, by=by: lr_scheduler.LambdaLR(inner, lambda step: by**step) for by in (0.9, 0.8)))
    with pytest.raises(ManifestMismatch, match=r"learning rate after 0, 1, 2, .* steps is 0.05, 0.04, .* here"):
        swarm.run()


def test_peers_with_unlike_schedules_are_told_that_their_parameters_part(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "manyhands.optim.run.drift")
    swarm_with(falling(10.0), falling(5.0)).run()
    said = [text for text in caplog.messages if "no majority of them has the same parameters" in text]
    assert 1 <= len(said) <= 2, "each peer says it once, if it reads the other's record of a step in time"
    assert all("another schedule" in text for text in said)


def test_a_peer_whose_schedule_differs_from_that_of_most_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "manyhands.optim.run.drift")
    swarm = swarm_with(falling(10.0), falling(10.0), falling(1.0))
    swarm.run()
    odd = swarm.members["p2"].peer.peer_id
    assert [text for text in caplog.messages if f"The parameters of peer {odd} differ" in text]
    assert not [text for text in caplog.messages if "The parameters of peer" in text and odd not in text]


def test_peers_with_the_same_schedule_hear_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "manyhands.optim.run.drift")
    swarm_with(cosine, cosine, cosine).run()
    assert not [record for record in caplog.records if record.name == "manyhands.optim.run.drift"]


def test_a_newcomer_without_the_schedule_is_refused() -> None:
    swarm = swarm_with(lambda inner: lr_scheduler.LambdaLR(inner, lambda step: 0.5), None, num_steps=1)
    with pytest.raises(ConfigError, match="scheduler is "):
        swarm.run()
