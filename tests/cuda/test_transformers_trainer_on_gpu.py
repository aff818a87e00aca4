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
ATOL = {"fp16": 1e-4, "bf16": 8e-4}
"""A few roundings of the largest sums."""


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_two_trainers_in_half_precision_make_the_steps_of_one_process(precision: str, tmp_path: Path) -> None:
    with peers(2) as swarm:
        trainers = [
            made(tmp_path / str(size), seed=size, per_device_train_batch_size=size, use_cpu=False, **{precision: True})
            for size in (2, 5)
        ]
        if precision == "fp16":
            for trainer in trainers:  # the usual scale of 65,536 overflows in the first batches, which are then dropped
                trainer.accelerator.scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        callbacks = [collaborating(trainer, peer) for trainer, peer in zip(trainers, swarm, strict=True)]
        recorders = [Recorder(trainer) for trainer in trainers]
        for trainer, recorder in zip(trainers, recorders, strict=True):
            trainer.add_callback(recorder)
        train_together(*trainers)
    assert [callback.optimizer.statistics.samples_dropped for callback in callbacks] == [0, 0]
    assert callbacks[0].optimizer.state_digest() == callbacks[1].optimizer.state_digest()
    steps = [[batch for recorder in recorders for batch in recorder.batches[step]] for step in range(1, NUM_STEPS + 1)]
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    autocast = torch.autocast("cuda", dtype, cache_enabled=False)
    expected = plain_steps(steps, arguments(tmp_path, use_cpu=False), autocast)
    for value, other, right in zip(
        trainers[0].model.parameters(), trainers[1].model.parameters(), expected.parameters(), strict=True
    ):
        assert value.is_cuda
        assert torch.equal(value, other)
        torch.testing.assert_close(value, right, rtol=0, atol=ATOL[precision])
