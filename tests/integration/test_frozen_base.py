"""Peers that train a part of a model have the same values in the rest of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import manyhands
from manyhands.base.errors import ManifestMismatch
from tests.trainers import AVERAGING, BATCH_SIZE, FAST, new_model, peers

OPTIONS: dict[str, Any] = {
    "run_id": "adapter", "target_batch_size": 8, "batch_size_per_step": BATCH_SIZE, "averaging": AVERAGING,
    "progress": FAST,
}  # fmt: skip


def joined(peer: manyhands.Peer, model: Any, *, is_told: bool = True) -> manyhands.Optimizer:
    inner = torch.optim.SGD(model[2].named_parameters(), lr=0.1)
    return manyhands.Optimizer(inner, peer=peer, **OPTIONS, **({"model": model} if is_told else {}))


def test_a_peer_with_another_base_is_refused_and_one_with_the_same_joins() -> None:
    with peers(3) as (one, same, other):
        kept = [joined(one, new_model()), joined(same, new_model())]  # else they leave the run
        with pytest.raises(
            ManifestMismatch, match=r"parameters outside the optimizer is 2 tensors of digest .* here, "
        ):
            joined(other, new_model(seed=1))
        assert len(kept) == 2


def test_a_peer_that_does_not_tell_its_base_is_refused_with_what_to_write(caplog: pytest.LogCaptureFixture) -> None:
    with peers(2) as (one, other):
        kept = joined(one, new_model())  # else it leaves the run
        assert "that the optimizer does not have" not in caplog.text
        with pytest.raises(
            ManifestMismatch, match=r"is not set here, .*; give Optimizer\(\.\.\., model=model\) on all"
        ):
            joined(other, new_model(), is_told=False)
        assert kept.global_step == 0
        assert "The model has 2 parameters that the optimizer does not have (0.bias, 0.weight)" in caplog.text


def test_an_evaluator_with_another_base_hears_of_it(caplog: pytest.LogCaptureFixture) -> None:
    class WithHead(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.base, self.head = torch.nn.Linear(5, 8).requires_grad_(requires_grad=False), torch.nn.Linear(8, 3)

    with peers(2) as (one, onlooker), caplog.at_level(logging.WARNING):
        model = WithHead(0)
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        optimizer = manyhands.Optimizer(torch.optim.SGD(named, lr=0.1), peer=one, model=model, **OPTIONS)
        for _ in range(2):
            model.head(model.base(torch.randn(4, 5))).square().mean().backward()
            optimizer.step()
        manyhands.load_state_from_peers(onlooker, "adapter", into=WithHead(0))
        assert "not the same here" not in caplog.text
        manyhands.load_state_from_peers(onlooker, "adapter", into=WithHead(1))
        assert "the other parameters are not the same here (2 tensors of digest" in caplog.text
