"""``transformers.Trainer`` in a run, in half precision on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.test_transformers_trainer import (
    Recorder,
    arguments,
    collaborating,
    libraries_are_as_before,
    made,
    plain_steps,
    train_together,
)
from tests.trainers import peers

__all__ = ["libraries_are_as_before"]

NUM_STEPS = 4


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_two_trainers_in_half_precision_make_the_steps_of_one_process(precision: str, tmp_path: Path) -> None:
    with peers(2) as swarm:
        trainers = [
            made(tmp_path / str(size), seed=size, per_device_train_batch_size=size, use_cpu=False, **{precision: True})
            for size in (2, 5)
        ]
        callbacks = [collaborating(trainer, peer) for trainer, peer in zip(trainers, swarm, strict=True)]
        recorders = [Recorder(trainer) for trainer in trainers]
        for trainer, recorder in zip(trainers, recorders, strict=True):
            trainer.add_callback(recorder)
        train_together(*trainers)
    assert callbacks[0].optimizer.state_digest() == callbacks[1].optimizer.state_digest()
    steps = [
        [
            {name: values.cpu() for name, values in batch.items()}
            for recorder in recorders
            for batch in recorder.batches[step]
        ]
        for step in range(1, NUM_STEPS + 1)
    ]
    expected = plain_steps(steps, arguments(tmp_path))
    for value, other, right in zip(
        trainers[0].model.parameters(), trainers[1].model.parameters(), expected.parameters(), strict=True
    ):
        assert value.is_cuda
        assert torch.equal(value, other)
        torch.testing.assert_close(value.cpu(), right, rtol=0, atol=2e-3)
