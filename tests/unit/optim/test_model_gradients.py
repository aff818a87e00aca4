from __future__ import annotations

import threading
import weakref

import pytest
import torch

from manyhands.optim.model_gradients import ModelGradients

SHOWN_N = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 1.0, 1.0])
"""Of two parameters with two and three values, and the shares that used them."""


def two_parameters(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=dtype, requires_grad=True) for size in (2, 3)]


def shown_after(
    parameters: list[torch.Tensor], shown_N: torch.Tensor = SHOWN_N, *, is_for_all: bool = True
) -> list[list[float] | None]:
    with ModelGradients(parameters).set_aside(lambda: (shown_N, is_for_all)):
        assert all(parameter.grad is None for parameter in parameters)
    return [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_same_tensors_come_back_with_other_values(dtype: torch.dtype) -> None:
    parameters = two_parameters(dtype)
    (parameters[0].sum() + parameters[1].sum()).backward()  # type: ignore[no-untyped-call]
    before = [parameter.grad for parameter in parameters]
    assert shown_after(parameters) == [[1.0, 2.0], [3.0, 4.0, 5.0]]
    assert all(parameter.grad is gradient for parameter, gradient in zip(parameters, before, strict=True))


def test_memory_that_nobody_else_sees_is_given_back_meanwhile() -> None:
    parameters = two_parameters()
    (parameters[0].sum() + parameters[1].sum()).backward()  # type: ignore[no-untyped-call]
    finalized = []
    for parameter in parameters:
        assert parameter.grad is not None
        weakref.finalize(parameter.grad, finalized.append, parameter)
    with ModelGradients(parameters).set_aside(lambda: (SHOWN_N, True)):
        assert len(finalized) == 2
    assert [parameter.grad.tolist() for parameter in parameters if parameter.grad is not None] == [
        [1.0, 2.0],
        [3.0, 4.0, 5.0],
    ]


def test_views_of_a_buffer_stay_views_and_the_rest_of_it_stays_as_it_is() -> None:
    parameters, buffer = two_parameters(), torch.full((6,), 9.0)
    parameters[0].grad, parameters[1].grad = buffer[:2], buffer[3:]
    with ModelGradients(parameters).set_aside(lambda: (SHOWN_N, True)):
        assert buffer.tolist() == [9.0] * 6
    assert buffer.tolist() == [1.0, 2.0, 9.0, 3.0, 4.0, 5.0]


def test_none_stays_none() -> None:
    parameters = two_parameters()
    parameters[1].grad = torch.zeros(3)
    assert shown_after(parameters) == [None, [3.0, 4.0, 5.0]]


def test_other_layouts_in_memory() -> None:
    parameters = [torch.zeros(2, 3, requires_grad=True)]
    parameters[0].grad = torch.empty_strided((2, 3), (1, 2))
    shown_after(parameters, torch.arange(7.0))
    assert parameters[0].grad.stride() == (1, 2)
    assert parameters[0].grad.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
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
    with ModelGradients(parameters).set_aside(lambda: (SHOWN_N, True)):
        assert shared.tolist() == [0.0, 0.0]
    assert shared.is_shared()
    assert shared.tolist() == [1.0, 2.0]


def test_memory_that_numpy_looks_at_is_not_given_back() -> None:
    parameters = two_parameters()
    parameters[0].grad = torch.zeros(2)
    seen = parameters[0].grad.numpy()
    with ModelGradients(parameters).set_aside(lambda: (SHOWN_N, True)):
        assert seen.tolist() == [0.0, 0.0]
    assert seen.tolist() == [1.0, 2.0]


def test_they_come_back_when_the_step_is_interrupted() -> None:
    parameters = two_parameters()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(KeyboardInterrupt), ModelGradients(parameters).set_aside(lambda: (SHOWN_N, True)):
        raise KeyboardInterrupt
    assert [parameter.grad.tolist() for parameter in parameters if parameter.grad is not None] == [
        [1.0, 2.0],
        [3.0, 4.0, 5.0],
    ]


@pytest.mark.parametrize("holder", ["name", "view", "detached", "buffer", "detached buffer"])
def test_who_sees_a_gradient_goes_on_to_see_it(holder: str) -> None:
    parameters = two_parameters()
    memory = torch.full((2,), 9.0)
    gradient = {"buffer": memory.view(2), "detached buffer": memory.detach()}.get(holder, memory)
    seen = {"name": gradient, "view": gradient.view(2, 1), "detached": gradient.detach()}.get(holder, memory)
    parameters[0].grad = gradient
    if holder != "name":
        del gradient
    if holder not in ("name", "buffer", "detached buffer"):
        del memory
    with ModelGradients(parameters).set_aside(lambda: (SHOWN_N, True)):
        assert seen.flatten().tolist() == [9.0, 9.0]
    assert seen.flatten().tolist() == [1.0, 2.0]
    assert parameters[0].grad is not None
    assert parameters[0].grad.data_ptr() == seen.data_ptr()


def test_after_a_failed_step_what_somebody_else_sees_is_what_it_was() -> None:
    parameters = two_parameters()
    accumulated = parameters[0].grad = torch.full((2,), 9.0)
    parameters[1].grad = torch.zeros(3)
    assert shown_after(parameters, is_for_all=False) == [[9.0, 9.0], [3.0, 4.0, 5.0]]
    assert parameters[0].grad is accumulated


def test_a_thread_that_reads_a_gradient_meanwhile_is_safe() -> None:
    parameters = [torch.zeros(1 << 20, requires_grad=True)]
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            gradient = parameters[0].grad
            if gradient is not None:
                gradient.norm()

    reader = threading.Thread(target=read)
    reader.start()
    shown_N = torch.ones((1 << 20) + 1)
    for _ in range(50):
        with ModelGradients(parameters).set_aside(lambda: (shown_N, True)):
            pass
        parameters[0].grad = torch.zeros(1 << 20)
    is_over.set()
    reader.join()


def test_one_that_cannot_come_back_keeps_no_other_one_away() -> None:
    parameters = two_parameters()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(RuntimeError), ModelGradients(parameters).set_aside(lambda: (SHOWN_N, True)):
        parameters[0].data = torch.zeros(1)  # no gradient of two values fits it
    assert parameters[1].grad is not None
    assert parameters[1].grad.tolist() == [3.0, 4.0, 5.0]


def test_a_model_that_became_half_as_precise_meanwhile() -> None:
    parameters = two_parameters()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    held = parameters[1].grad
    assert held is not None
    with ModelGradients(parameters).set_aside(lambda: (SHOWN_N, True)):
        for parameter in parameters:
            parameter.data = parameter.data.half()
    assert [str(parameter.grad.dtype) for parameter in parameters if parameter.grad is not None] == [
        "torch.float16"
    ] * 2
