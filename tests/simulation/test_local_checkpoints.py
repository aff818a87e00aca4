"""With local steps, checkpoints are of the agreed parameters, and all peers go on from them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import manyhands
from manyhands.base.errors import ConfigError
from manyhands.optim.local_steps import nesterov
from tests.simulation.swarm_of_trainers import Member, Swarm, together

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LOCAL = 3
SETTINGS: dict[str, Any] = {
    "target_batch_size": 2 * NUM_LOCAL * 4, "batch_size_per_step": 4, "local_steps": manyhands.LocalSteps(nesterov),
    "scheduler": lambda inner: torch.optim.lr_scheduler.StepLR(inner, 2),
}  # fmt: skip


def new_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)


def loss_of(member: Member, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number + (1000 if member.name == "p1" else 0))
    dtype = next(member.model.parameters()).dtype
    inputs, targets = (torch.randn(4, size, generator=generator).to(dtype) for size in (6, 3))
    return torch.nn.functional.mse_loss(member.model(inputs), targets)


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def agreed_by(member: Member) -> dict[str, torch.Tensor]:
    with member.optimizer.agreed_parameters():
        return copied(member.model)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def two_peers(train: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Swarm:
    logging.getLogger("manyhands").setLevel(logging.WARNING)
    swarm = Swarm()
    for name in ("p0", "p1"):
        swarm.start(
            name, lambda: new_model(dtype), lambda model: torch.optim.AdamW(model.parameters(), lr=0.05), train,
            **{**SETTINGS, **options},
        )  # fmt: skip
    swarm.run(900.0)
    return swarm


def train_to(member: Member, numbers: range) -> None:
    for number in numbers:
        member.step(loss_of(member, number))
        member.check_samples()
        if (number + 1) % NUM_LOCAL == 0:
            member.wait_for((number + 1) // NUM_LOCAL)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {"offload": True})],
    ids=["in the model", "offload, half precision"],
)
def test_a_checkpoint_between_two_averages_is_of_the_agreed_parameters_and_changes_nothing(
    dtype: torch.dtype, options: dict[str, Any], tmp_path: Path
) -> None:
    ends: dict[bool, dict[str, torch.Tensor]] = {}

    def program(member: Member, *, saves: bool) -> None:
        together(2, member)
        checkpoints = manyhands.Checkpoints(tmp_path / f"{member.name} {saves}", member.optimizer, member.model)
        train_to(member, range(4))  # one inner step after the average
        if saves and member.name == "p0":
            agreed, own = agreed_by(member), copied(member.model)
            checkpoints.close()
            saved = load_file(tmp_path / "p0 True" / "checkpoint-1" / "model.safetensors")
            assert_equal(saved, agreed)
            assert any(not torch.equal(value, agreed[name]) for name, value in own.items())
            assert_equal(copied(member.model), own)
        train_to(member, range(4, 9))
        ends[saves] = agreed_by(member)
        checkpoints.close()

    for saves in (True, False):
        two_peers(lambda member, saves=saves: program(member, saves=saves), dtype, **options)
    assert_equal(ends[True], ends[False])


def test_all_peers_resume_with_both_optimizers(tmp_path: Path) -> None:
    """After an average nobody has steps of its own, so the resumed run makes the steps of one that never stopped."""
    ends: dict[str, set[str]] = {"whole": set(), "resumed": set()}

    def whole(member: Member) -> None:
        together(2, member)
        with manyhands.Checkpoints(tmp_path / member.name, member.optimizer, member.model) as checkpoints:
            assert not checkpoints.resume()
            train_to(member, range(6))
        member.wait_for(2)
        train_to(member, range(6, 12))
        ends["whole"].add(member.optimizer.state_digest())

    def resumed(member: Member) -> None:
        with manyhands.Checkpoints(tmp_path / member.name, member.optimizer, member.model, every=100) as checkpoints:
            member.peer.sleep(20.0 - member.peer.time())  # else the second one takes the state of the first
            assert checkpoints.resume()
            assert member.optimizer.global_step == 2
            assert member.optimizer.inner.param_groups[0]["lr"] == pytest.approx(0.005)
            together(2, member)
            train_to(member, range(6, 12))
        ends["resumed"].add(member.optimizer.state_digest())

    two_peers(whole)
    two_peers(resumed)
    assert len(ends["whole"]) == 1
    assert ends["resumed"] == ends["whole"]


TWO_PEERS = (
    "target_batch_size=10 is below one batch of 6 samples for each of the 2 peers: local steps need at least one of "
    "every peer between two averages; for example batches of 5 here, or a run with target_batch_size=1200"
)
ONE_PEER = (
    "target_batch_size=10 is below one batch of 12 samples: local steps need at least one of every peer between two "
    "averages; for example batches of 10 here, or a run with target_batch_size=1200"
)


@pytest.mark.parametrize(
    ("batch_size", "is_given_to_step", "message"), [(6, False, TWO_PEERS), (12, False, ONE_PEER), (12, True, ONE_PEER)]
)
def test_a_target_below_one_batch_of_every_peer_is_refused(
    batch_size: int, is_given_to_step: bool, message: str
) -> None:
    """When a second peer joins a run with a target of 10 samples, or makes its first batch."""

    def program(member: Member) -> None:
        for number in range(30):
            member.step(loss_of(member, number))
            member.check_samples()

    def late(member: Member) -> None:
        assert is_given_to_step, "it joined"
        member.step(loss_of(member, 0), batch_size=0)  # adds nothing
        member.step(loss_of(member, 0), batch_size=batch_size)

    def inner(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    logging.getLogger("manyhands").setLevel(logging.WARNING)
    swarm, options = Swarm(), {**SETTINGS, "target_batch_size": 10}
    swarm.start("p0", new_model, inner, program, **options)
    own_size = None if is_given_to_step else batch_size
    swarm.start("p1", new_model, inner, late, begins_s=5.0, **options | {"batch_size_per_step": own_size})
    with pytest.raises(ConfigError) as raised:
        swarm.run()
    assert str(raised.value) == message
