"""How far a GPU and a CPU get apart that make the same steps: what they hold differs by rounding only."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from manyhands.optim import Lamb
from manyhands.optim.run.step_rounds import Averaged
from manyhands.optim.step.replica import Replica

NUM_STEPS = 1000
SHAPES = [(500, 400), (1000,), (200, 300)]


def parameters_after(make: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    parameters = [
        torch.nn.Parameter((0.05 * torch.randn(shape, generator=generator)).to(device, dtype)) for shape in SHAPES
    ]
    replica = Replica(make(parameters), None, max_grad_norm=1.0)
    numel = sum(parameter.numel() for parameter in parameters)
    for _ in range(NUM_STEPS):
        averaged_N = torch.cat([0.01 * torch.randn(numel, generator=generator), torch.ones(len(SHAPES))])
        assert not replica.advance(averaged_N, Averaged(None, b"next", 1))
    return torch.cat([parameter.detach().double().cpu().flatten() for parameter in parameters])


@pytest.mark.parametrize(
    ("make", "dtype", "bound"),
    [
        (partial(torch.optim.AdamW, lr=1e-3), torch.float32, 1e-6),
        (partial(Lamb, lr=2e-3), torch.float32, 1e-6),
        (partial(torch.optim.AdamW, lr=1e-3), torch.bfloat16, 1e-3),
    ],
    ids=["AdamW", "Lamb", "AdamW-bfloat16"],
)
def test_a_gpu_and_a_cpu_stay_close_over_a_thousand_steps(make: Any, dtype: torch.dtype, bound: float) -> None:
    on_cpu_N, on_gpu_N = (parameters_after(make, dtype, device) for device in ("cpu", "cuda"))
    distance = float((on_cpu_N - on_gpu_N).norm() / on_cpu_N.norm())
    print(f"{distance:.2g} of their size apart after {NUM_STEPS} steps")
    assert distance < bound
