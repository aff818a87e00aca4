from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.averaging.codecs import Chosen
from manyhands.base.errors import ConfigError
from manyhands.optim.extra_tensors import MAX_INTEGER, ExtraTensors, extra_tensors_of


def test_averaged_values_reach_the_tensors_when_they_are_copied_to_the_model() -> None:
    floats, counts, flags = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor(5), torch.tensor([True, False])
    extra = extra_tensors_of([("counts", counts), ("floats", floats)], {"flags": flags})
    assert extra.shapes == [(2,), (3,)], "floats, then integers"
    assert [isinstance(shape, Chosen) for shape in extra.shapes] == [False, True]
    assert extra.contribution().tolist() == [1.0, 2.0, 5.0, 1.0, 0.0]
    extra.agree(torch.tensor([1.5, 2.5, 6.6, 0.4, 0.9]))
    assert floats.tolist() == [1.0, 2.0]
    extra.copy_to_model()
    assert (floats.tolist(), counts.item(), flags.tolist()) == ([1.5, 2.5], 7, [False, True])
    assert extra.names == ["counts", "floats", "flags"]


def test_averages_that_an_integer_type_cannot_hold_are_clamped() -> None:
    tensors = {str(dtype): torch.zeros(2, dtype=dtype) for dtype in (torch.uint8, torch.int8, torch.int64)}
    extra = extra_tensors_of(None, tensors)
    extra.agree(torch.tensor([-1e30, 1e30] * 3))
    assert [agreed.tolist() for agreed in extra.agreed] == [[0, 255], [-128, 127], [-MAX_INTEGER, MAX_INTEGER]]


def test_tensor_values_that_are_not_finite_are_not_contributed() -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0])
    extra = ExtraTensors([("statistics", tensor)])
    tensor.copy_(torch.tensor([float("nan"), 5.0, float("inf")]))
    assert extra.contribution().tolist() == [1.0, 5.0, 3.0]


def test_agreed_values_do_not_follow_the_tensors() -> None:
    tensor = torch.zeros(2)
    extra = ExtraTensors([("statistics", tensor)])
    tensor.fill_(4.0)
    assert extra.agreed[0].tolist() == [0.0, 0.0]
    extra.load(extra.own)
    assert extra.agreed[0].tolist() == [4.0, 4.0]
    extra.load([torch.ones(2)])
    extra.copy_to_model()
    assert tensor.tolist() == extra.agreed[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ([("one", torch.zeros(1)), ("one", torch.zeros(1))], "two tensors named 'one'"),
        ([("waves", torch.zeros(1, dtype=torch.complex64))], "waves is torch.complex64"),
        ([("seeds", torch.tensor([-MAX_INTEGER - 1]))], "seeds has integers above 16777216"),
        ([("nowhere", torch.zeros(1, device="meta"))], "nowhere is torch.float32, torch.strided on meta"),
    ],
)
def test_tensors_that_cannot_be_averaged_are_refused_by_name(named: list[tuple[str, torch.Tensor]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ExtraTensors(named)


@pytest.mark.parametrize(
    ("buffers", "extra", "words"),
    [
        (torch.nn.BatchNorm1d(2), None, r"buffers is a module; write buffers=model.named_buffers\(\)"),
        (torch.nn.BatchNorm1d(2).buffers(), None, r"without names; write buffers=model.named_buffers\(\)"),
        (None, [torch.zeros(1)], "extra_tensors is of type list; give a dict of names and tensors"),
        (None, {"mean": 3.0}, "mean is of type float; a torch.Tensor is needed"),
    ],
)
def test_tensors_without_names_and_what_is_no_tensor_are_refused(buffers: Any, extra: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        extra_tensors_of(buffers, extra)


def test_a_model_without_extra_tensors_contributes_none() -> None:
    extra = ExtraTensors()
    assert extra.contribution().numel() == len(extra.shapes) == 0
    extra.agree(torch.empty(0))
    extra.copy_to_model()
