"""Checkpoints of a peer with a GPU, resumed on either kind of device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands
from manyhands.optim.local_steps import LocalSteps, nesterov
from tests.cuda.test_optimizer_on_gpu import ADAMW, BATCH_SIZE, batch_of, loss_of, new_model, wait_for_step
from tests.trainers import AVERAGING, FAST, peers

SAVED_AT = 3
LAST = 5


def train(
    folder: Path, device: str, last: int, look: Callable[[manyhands.Optimizer], None], **options: Any
) -> torch.nn.Module:
    """Train alone, from the checkpoint of the folder if there is one, to step ``last``."""
    model = new_model(device)
    with peers(1) as (peer,):
        optimizer = manyhands.Optimizer(
            ADAMW(list(model.parameters())), peer=peer, run_id="checkpoints", target_batch_size=BATCH_SIZE,
            batch_size_per_step=BATCH_SIZE, averaging=AVERAGING, progress=FAST, **options,
        )  # fmt: skip
        with manyhands.Checkpoints(folder, optimizer, model, every=SAVED_AT) as checkpoints:
            checkpoints.resume()
            look(optimizer)
            for step in range(optimizer.global_step, last):
                loss_of(model, batch_of(step, 0, model)).backward()
                optimizer.step()
                optimizer.zero_grad()
                wait_for_step(optimizer, step + 1)
                optimizer.settle()
                checkpoints.save_if_due()
    return model


@pytest.mark.parametrize("resumed_on", ["cuda", "cpu"])
@pytest.mark.parametrize(
    "options",
    [{}, {"offload": True}, {"delay": "gradients"}, {"local_steps": LocalSteps(nesterov)}],
    ids=["plain", "offload", "delay", "local_steps"],
)
def test_training_goes_on_from_a_checkpoint(resumed_on: str, options: dict[str, Any], tmp_path: Path) -> None:
    places = []
    whole = train(tmp_path / "whole", "cuda", LAST, lambda optimizer: None, **options)
    train(tmp_path / "parts", "cuda", SAVED_AT, lambda optimizer: None, **options)
    resumed = train(
        tmp_path / "parts", resumed_on, LAST, lambda optimizer: places.append(optimizer.global_step), **options
    )
    assert places == [SAVED_AT]
    assert {parameter.device.type for parameter in resumed.parameters()} == {resumed_on}
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        if resumed_on == "cuda":
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs.cpu(), rtol=1e-4, atol=1e-5)
