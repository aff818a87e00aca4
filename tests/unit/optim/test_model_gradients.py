from __future__ import annotations

import pytest
import torch

from manyhands.optim.model_gradients import ModelGradients

SHOWN_N = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 1.0, 1.0])
"""Of two parameters with two and three values, and the shares that used them."""


def two_parameters(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=dtype, requires_grad=True) for size in (2, 3)]


def shown_after(parameters: list[torch.Tensor], shown_N: torch.Tensor = SHOWN_N) -> list[list[float] | None]:
    with ModelGradients(parameters).set_aside(lambda: shown_N):
        assert all(parameter.grad is None for parameter in parameters)
    return [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_same_tensors_come_back_with_other_values(dtype: torch.dtype) -> None:
    parameters = two_parameters(dtype)
    (parameters[0].sum() + parameters[1].sum()).backward()  # type: ignore[no-untyped-call]
    before = [parameter.grad for parameter in parameters]
    assert shown_after(parameters) == [[1.0, 2.0], [3.0, 4.0, 5.0]]
    assert all(parameter.grad is gradient for parameter, gradient in zip(parameters, before, strict=True))


def test_their_memory_is_free_meanwhile() -> None:
    parameters = two_parameters()
    (parameters[0].sum() + parameters[1].sum()).backward()  # type: ignore[no-untyped-call]
    storages = [parameter.grad.untyped_storage() for parameter in parameters if parameter.grad is not None]
    with ModelGradients(parameters).set_aside(lambda: SHOWN_N):
        assert [storage.nbytes() for storage in storages] == [0, 0]
    assert [storage.nbytes() for storage in storages] == [8, 12]


def test_views_of_a_buffer_stay_views_and_the_rest_of_it_stays_as_it_is() -> None:
    parameters, buffer = two_parameters(), torch.full((6,), 9.0)
    parameters[0].grad, parameters[1].grad = buffer[:2], buffer[3:]
    with ModelGradients(parameters).set_aside(lambda: SHOWN_N):
        assert buffer.tolist() == [9.0] * 6
    assert buffer.tolist() == [1.0, 2.0, 9.0, 3.0, 4.0, 5.0]


def test_none_stays_none() -> None:
    parameters = two_parameters()
    parameters[1].grad = torch.zeros(3)
    assert shown_after(parameters) == [None, [3.0, 4.0, 5.0]]


def test_other_layouts_in_memory() -> None:
    parameters = [torch.zeros(2, 3, requires_grad=True)]
    gradient = parameters[0].grad = torch.zeros(3, 2).t()
    shown_after(parameters, torch.arange(7.0))
    assert parameters[0].grad is gradient
    assert gradient.stride() == (1, 2)
    assert gradient.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_gradients_that_share_their_memory_have_their_own_values_afterwards() -> None:
    """Autograd itself makes such ones."""
    one, other = torch.zeros(2, 3, requires_grad=True), torch.zeros(3, 2, requires_grad=True)
    (one.view(-1) + other.view(-1)).sum().backward()  # type: ignore[no-untyped-call]
    parameters: list[torch.Tensor] = [one, other]
    shown = shown_after(parameters, torch.arange(14.0))
    assert shown == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [[6.0, 7.0], [8.0, 9.0], [10.0, 11.0]]]


def test_gradients_that_cannot_be_written_to() -> None:
    parameters = two_parameters()
    parameters[0].grad = torch.ones(1).expand(2)
    parameters[1].grad = torch.sparse_coo_tensor([[1]], [1.0], (3,), check_invariants=True)
    assert shown_after(parameters) == [[1.0, 2.0], [3.0, 4.0, 5.0]]


def test_empty_parameters() -> None:
    parameters = [torch.zeros(0, requires_grad=True), torch.zeros(0, requires_grad=True), *two_parameters()[:1]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    assert shown_after(parameters, torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0])) == [[], [], [1.0, 2.0]]


def test_shared_memory_is_not_given_back() -> None:
    parameters = two_parameters()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter).share_memory_()
    shared = parameters[0].grad
    assert shared is not None
    with ModelGradients(parameters).set_aside(lambda: SHOWN_N):
        assert shared.tolist() == [0.0, 0.0]
    assert shared.is_shared()
    assert shared.tolist() == [1.0, 2.0]


def test_memory_that_numpy_looks_at_is_not_given_back() -> None:
    parameters = two_parameters()
    parameters[0].grad = torch.zeros(2)
    seen = parameters[0].grad.numpy()
    with ModelGradients(parameters).set_aside(lambda: SHOWN_N):
        assert seen.tolist() == [0.0, 0.0]
    assert seen.tolist() == [1.0, 2.0]


def test_they_come_back_when_the_step_is_interrupted() -> None:
    parameters = two_parameters()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(KeyboardInterrupt), ModelGradients(parameters).set_aside(lambda: SHOWN_N):
        raise KeyboardInterrupt
    assert [parameter.grad.tolist() for parameter in parameters if parameter.grad is not None] == [
        [1.0, 2.0],
        [3.0, 4.0, 5.0],
    ]
