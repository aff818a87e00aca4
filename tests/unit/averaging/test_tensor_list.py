"""What can be averaged, and what is said of what cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.averaging.tensor_list import TensorList
from manyhands.base.errors import ConfigError

BASE = torch.zeros(4, 6)
NEEDS_GRADIENT = torch.zeros(3, requires_grad=True)


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "tensors is an empty list; give at least one"),
        (torch.nn.Linear(2, 2), r"tensors is of type Linear; give tensors, such as model\.parameters\(\)"),
        (torch.zeros(3), r"tensors is one tensor; give a list of tensors, for example \[tensor\]"),
        ([torch.zeros(3), [1.0]], "tensor 1 is a list; a torch.Tensor is needed"),
        ([torch.zeros(3, dtype=torch.int64)], "tensor 0 is torch.int64; those that can be averaged are torch.float16"),
        ([torch.zeros(3, dtype=torch.complex64)], "tensor 0 is torch.complex64"),
        ([torch.zeros(3, device="meta")], "tensor 0 is torch.strided on meta; a dense one with memory is needed"),
        ([torch.zeros(3).to_sparse()], "tensor 0 is torch.sparse_coo on cpu"),
        ([made_in_inference_mode()], "tensor 0 was made in inference mode"),
        ([NEEDS_GRADIENT * 2], "tensor 0 is the result of a computation with gradients; give tensor.detach"),
        ([torch.zeros(1, 3).expand(4, 3)], "several values of tensor 0 share memory, as after expand"),
        ([BASE.as_strided((3, 3), (1, 1))], "several values of tensor 0 share memory"),
        ([BASE, BASE], "tensors 0 and 1 share memory"),
        ([torch.ones(1), BASE, BASE[1:]], "tensors 1 and 2 share memory"),
        ([BASE[:, 1], BASE[:, 0]], "tensors 0 and 1 share memory, or are interleaved in it"),
        ([BASE.t()[2:], BASE.view(-1)], "tensors 0 and 1 share memory"),
    ],
)
def test_tensors_that_cannot_be_averaged_are_refused_with_the_reason(tensors: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TensorList(tensors)


def test_adjacent_views_of_one_buffer_can_be_averaged() -> None:
    buffer = torch.arange(10.0)
    values = TensorList([buffer[:4], buffer[4:].view(2, 3)]).values()
    assert torch.equal(values, buffer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_come_back_as_they_went(dtype: torch.dtype) -> None:
    first = torch.randn(4, 6).to(dtype)
    tensors = [first.t(), torch.randn(3).to(dtype)[::2], torch.tensor(2.0, dtype=dtype)]
    before = [tensor.clone() for tensor in tensors]
    those = TensorList(tensors)
    flat_N = those.values().clone()
    assert flat_N.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for tensor in tensors:
        tensor.zero_()
    those.assign(flat_N)
    for tensor, expected in zip(tensors, before, strict=True):
        assert torch.equal(tensor, expected)
        assert tensor.stride() == expected.stride() or tensor.dim() < 2


def test_the_fingerprint_is_of_shapes_and_dtypes_not_of_values() -> None:
    base = TensorList([torch.zeros(2, 3), torch.zeros(1)]).fingerprint()
    assert TensorList([torch.ones(2, 3), torch.ones(1)]).fingerprint() == base
    for others in (
        [torch.zeros(3, 2), torch.zeros(1)],
        [torch.zeros(2, 3)],
        [torch.zeros(1), torch.zeros(2, 3)],
        [torch.zeros(2, 3), torch.zeros(1).half()],
    ):
        assert TensorList(others).fingerprint() != base


def test_the_summary_is_short() -> None:
    assert TensorList([torch.zeros(2, 3)]).summary() == "1 with 6 values: float32[2, 3] on cpu"
    assert len(TensorList([torch.zeros(1) for _ in range(1000)]).summary()) <= 200


def test_the_values_outlive_the_memory_of_the_tensor() -> None:
    tensor = torch.ones(8)
    values = TensorList([tensor]).values()
    tensor.untyped_storage().resize_(0)
    assert torch.equal(values, torch.ones(8))


def test_values_that_are_not_finite_are_named() -> None:
    tensors = [torch.zeros(3), torch.tensor([1.0, float("inf")])]
    those = TensorList(tensors)
    with pytest.raises(ConfigError, match="tensor 1 has a value that is infinite or NaN, and nothing was sent"):
        those.check_finite(those.values())
