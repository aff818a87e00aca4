"""The numbers that peers compare are the same wherever the parameters are."""

from __future__ import annotations

import pytest
import torch

from manyhands.averaging.sketch import unpacked
from manyhands.optim.run.drift import SUMMED_NUMEL, sketch_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sketches_on_a_gpu_and_on_several_devices_equal_those_on_the_host(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (3 * SUMMED_NUMEL + 1234, 7, 0, 1)
    tensors = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    on_host = sketch_of(tensors, 5)
    expected = pytest.approx(unpacked(on_host.sums), abs=1e-6 * sum(sizes) ** 0.5)
    on_gpu = [tensor.cuda() for tensor in tensors]
    for places in (on_gpu, [on_gpu[0], *tensors[1:]]):
        sketch = sketch_of(places, 5)
        assert unpacked(sketch.sums) == expected
        assert sketch.size == pytest.approx(on_host.size, rel=1e-4)
