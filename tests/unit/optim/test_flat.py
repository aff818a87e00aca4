"""How an averaged gradient comes back into the ``.grad`` of a model."""

from __future__ import annotations

import pytest
import torch

from manyhands.optim.flat import GradientLayout

SHOWN_N = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 1.0, 1.0])
"""Of two parameters with two and three values, and the shares that used them."""


def two_parameters(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=dtype, requires_grad=True) for size in (2, 3)]


def shown(parameters: list[torch.Tensor], shown_N: torch.Tensor = SHOWN_N) -> list[list[float] | None]:
    GradientLayout(parameters).write_to_grad(parameters, shown_N)
    return [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_same_tensors_have_other_values(dtype: torch.dtype) -> None:
    parameters = two_parameters(dtype)
    (parameters[0].sum() + parameters[1].sum()).backward()  # type: ignore[no-untyped-call]
    before = [parameter.grad for parameter in parameters]
    assert shown(parameters) == [[1.0, 2.0], [3.0, 4.0, 5.0]]
    assert all(parameter.grad is gradient for parameter, gradient in zip(parameters, before, strict=True))


def test_views_of_a_buffer_stay_views_and_the_rest_of_it_stays_as_it_is() -> None:
    parameters, buffer = two_parameters(), torch.full((6,), 9.0)
    parameters[0].grad, parameters[1].grad = buffer[:2], buffer[3:]
    shown(parameters)
    assert buffer.tolist() == [1.0, 2.0, 9.0, 3.0, 4.0, 5.0]


def test_none_stays_none() -> None:
    parameters = two_parameters()
    parameters[1].grad = torch.zeros(3)
    assert shown(parameters) == [None, [3.0, 4.0, 5.0]]


def test_gradients_that_share_their_memory_have_their_own_values_afterwards() -> None:
    """Autograd itself makes such ones."""
    one, other = torch.zeros(2, 3, requires_grad=True), torch.zeros(3, 2, requires_grad=True)
    (one.view(-1) + other.view(-1)).sum().backward()  # type: ignore[no-untyped-call]
    both: list[torch.Tensor] = [one, other]
    assert shown(both, torch.arange(14.0)) == [
        [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        [[6.0, 7.0], [8.0, 9.0], [10.0, 11.0]],
    ]


def test_gradients_that_cannot_be_written_to() -> None:
    parameters = two_parameters()
    parameters[0].grad = torch.ones(1).expand(2)
    parameters[1].grad = torch.sparse_coo_tensor([[1]], [1.0], (3,), check_invariants=True)
    assert shown(parameters) == [[1.0, 2.0], [3.0, 4.0, 5.0]]


def test_empty_parameters() -> None:
    parameters = [torch.zeros(0, requires_grad=True), torch.zeros(0, requires_grad=True), *two_parameters()[:1]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    assert shown(parameters, torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0])) == [[], [], [1.0, 2.0]]
