"""Local steps on a GPU, beside a peer without one."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

import manyhands
from manyhands.averaging.codecs import Sparse
from manyhands.optim.local_steps import LocalSteps, nesterov
from tests.cuda.test_optimizer_on_gpu import ADAMW, BATCH_SIZE, batch_of, loss_of, new_model, wait_for_step
from tests.trainers import AVERAGING, FAST, in_threads, peers

INNER_STEPS = 3
OUTER_STEPS = 4
MODES = {
    "averages": LocalSteps(),
    "nesterov": LocalSteps(nesterov),
    "fragments": LocalSteps(nesterov, fragments=2),
    "sparse": LocalSteps(sparse=Sparse()),
}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_and_a_cpu_agree_after_each_average(mode: str, offload: bool) -> None:
    models = [new_model("cuda"), new_model("cpu")]
    barrier = threading.Barrier(2, timeout=60)
    agreed: list[list[Any]] = [[], []]

    def train(number: int, peer: manyhands.Peer) -> None:
        model, local_steps = models[number], MODES[mode]
        optimizer = manyhands.Optimizer(
            ADAMW(list(model.parameters())), peer=peer, run_id="local", batch_size_per_step=BATCH_SIZE,
            target_batch_size=2 * BATCH_SIZE * INNER_STEPS * local_steps.fragments, local_steps=local_steps,
            offload=offload, averaging=AVERAGING, progress=FAST,
        )  # fmt: skip
        barrier.wait()
        for outer_step in range(OUTER_STEPS):
            for inner_step in range(INNER_STEPS):
                loss_of(model, batch_of(outer_step * INNER_STEPS + inner_step, number, model)).backward()
                optimizer.step()
                optimizer.zero_grad()
            wait_for_step(optimizer, outer_step + 1)
            optimizer.settle()
            with optimizer.agreed_parameters():
                agreed[number].append([parameter.detach().cpu().clone() for parameter in model.parameters()])
        assert optimizer.statistics.samples_dropped == 0
        barrier.wait()

    with peers(2) as swarm:
        in_threads([partial(train, number, peer) for number, peer in enumerate(swarm)], timeout_s=120.0)
    assert all(parameter.is_cuda for parameter in models[0].parameters())
    initial = list(new_model("cpu").parameters())
    for on_gpu, on_cpu in zip(*agreed, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-6)
        assert not all(torch.equal(one, before) for one, before in zip(on_gpu, initial, strict=True))
