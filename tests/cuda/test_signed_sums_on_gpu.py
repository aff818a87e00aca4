"""The numbers that peers compare are the same wherever the parameters are."""

from __future__ import annotations

import pytest
import torch

from manyhands.optim.run.signed_sums import PIECE, signed_sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_and_on_several_devices(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (3 * PIECE + 1234, 7, 0, 1)
    tensors = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    on_host, norm = signed_sums(tensors, 5)
    expected = pytest.approx(on_host, abs=1e-6 * sum(sizes) ** 0.5)
    on_gpu = [tensor.cuda() for tensor in tensors]
    for places in (on_gpu, [on_gpu[0], *tensors[1:]]):
        sums, size = signed_sums(places, 5)
        assert sums == expected
        assert size == pytest.approx(norm, rel=1e-4)
