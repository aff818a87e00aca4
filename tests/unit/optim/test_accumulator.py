from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.optim.accumulator import GradientAccumulator
from manyhands.optim.extra_tensors import ExtraTensors


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def gradients_after(
    accumulator: GradientAccumulator, parameters: list[torch.Tensor], flat: torch.Tensor | None = None
) -> list[torch.Tensor | None]:
    contribution = accumulator.freeze()
    accumulator.take_back(contribution)
    with accumulator.layout.installed(parameters, contribution.mean_N if flat is None else flat):
        return [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]


def age_of(accumulator: GradientAccumulator) -> tuple[int, int, bool]:
    return accumulator.samples, accumulator.since_step, accumulator.was_out


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_any_split_into_batches_gives_the_gradient_of_the_whole(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(sum(sizes), 3, generator=generator)
    weight = torch.randn(3, generator=generator, requires_grad=True)
    (inputs @ weight).square().mean().backward()
    assert weight.grad is not None
    whole = weight.grad.clone()
    accumulator = GradientAccumulator([weight], ExtraTensors())
    for batch in torch.split(inputs, sizes):
        weight.grad = None
        (batch @ weight).square().mean().backward()
        assert accumulator.add(len(batch))
    assert accumulator.samples == sum(sizes)
    (averaged,) = gradients_after(accumulator, [weight])
    torch.testing.assert_close(averaged, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_batch_that_is_not_finite_leaves_what_was_there(bad: float) -> None:
    parameters = parameters_of((2,), (3,))
    accumulator = GradientAccumulator(parameters, ExtraTensors())
    parameters[0].grad, parameters[1].grad = torch.ones(2), torch.ones(3)
    assert accumulator.add(4)
    parameters[1].grad = torch.tensor([1.0, bad, 1.0])
    assert not accumulator.add(4)
    assert accumulator.samples == 4
    for gradient in gradients_after(accumulator, parameters):
        assert gradient is not None
        assert torch.equal(gradient, torch.ones_like(gradient))


def test_opposite_infinities_do_not_cancel() -> None:
    (parameter,) = parameters_of((2,))
    accumulator = GradientAccumulator([parameter], ExtraTensors())
    parameter.grad = torch.tensor([float("inf"), float("-inf")])
    assert not accumulator.add(1)


def test_large_half_precision_gradients_are_finite() -> None:
    """Their sum is not, in their own precision."""
    (parameter,) = parameters_of((4096,), dtype=torch.float16)
    accumulator = GradientAccumulator([parameter], ExtraTensors())
    parameter.grad = torch.full((4096,), 100.0, dtype=torch.float16)
    assert accumulator.add(1)
    (averaged,) = gradients_after(accumulator, [parameter])
    assert averaged is not None
    assert averaged.dtype == torch.float16
    assert torch.equal(averaged, parameter.grad)


def test_many_large_batches_do_not_overflow() -> None:
    (parameter,) = parameters_of((1,))
    accumulator = GradientAccumulator([parameter], ExtraTensors())
    parameter.grad = torch.tensor([1e37])
    for _ in range(20):
        assert accumulator.add(1000)
    (averaged,) = gradients_after(accumulator, [parameter])
    torch.testing.assert_close(averaged, parameter.grad)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("has_unused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_any_kind_give_the_same_mean(scale: float, has_unused: bool, dtype: torch.dtype) -> None:
    """Plain ones are added in one call, all others one by one."""
    parameters = parameters_of((3, 4), (5,), *[(2,)] * has_unused, dtype=dtype)
    accumulator = GradientAccumulator(parameters, ExtraTensors())
    generator = torch.Generator().manual_seed(3)
    batches = [[torch.randn(p.shape, dtype=dtype, generator=generator) for p in parameters[:2]] for _ in range(4)]
    for samples, batch in enumerate(batches, 1):
        for parameter, gradient in zip(parameters, batch, strict=False):
            parameter.grad = gradient * scale
        assert accumulator.add(samples, grad_scale=scale)
    for number, averaged in enumerate(gradients_after(accumulator, parameters)[:2]):
        whole = sum(samples * batch[number] for samples, batch in enumerate(batches, 1)) / 10
        torch.testing.assert_close(averaged, whole, rtol=1e-5, atol=1e-6)


def test_a_contribution_that_was_handed_out_is_not_written_to() -> None:
    (parameter,) = parameters_of((2,))
    accumulator = GradientAccumulator([parameter], ExtraTensors())
    parameter.grad = torch.ones(2)
    accumulator.add(1)
    contribution = accumulator.freeze()
    parameter.grad = torch.full((2,), 9.0)
    accumulator.add(1)
    accumulator.add(1)
    assert contribution.mean_N.tolist() == [1.0, 1.0, 1.0]


def test_unused_parameters_count_as_zero_in_the_batches_that_did_not_use_them() -> None:
    used, sometimes, never = parameters = parameters_of((1,), (1,), (1,))
    accumulator = GradientAccumulator(parameters, ExtraTensors())
    used.grad, sometimes.grad = torch.tensor([1.0]), torch.tensor([8.0])
    accumulator.add(1)
    sometimes.grad = None
    accumulator.add(3)
    assert gradients_after(accumulator, parameters) == [torch.tensor([1.0]), torch.tensor([2.0]), None]
    assert never.grad is None


def test_a_gradient_of_zero_is_not_the_same_as_none() -> None:
    """As with the first factor of a LoRA pair while the second is zero: the optimizer must see it."""
    parameters = parameters_of((2,), (2,))
    accumulator = GradientAccumulator(parameters, ExtraTensors())
    parameters[0].grad = torch.zeros(2)
    accumulator.add(5)
    gradients = gradients_after(accumulator, parameters)
    assert gradients[0] is not None
    assert torch.equal(gradients[0], torch.zeros(2))
    assert gradients[1] is None


def test_a_parameter_that_another_peer_used_gets_its_gradient() -> None:
    here, there = ([*parameters_of((1,), (1,))] for _ in range(2))
    accumulators = [GradientAccumulator(here, ExtraTensors()), GradientAccumulator(there, ExtraTensors())]
    here[0].grad = torch.tensor([4.0])
    there[1].grad = torch.tensor([4.0])
    accumulators[0].add(1)
    accumulators[1].add(3)
    first, second = (accumulator.freeze() for accumulator in accumulators)
    averaged = (first.mean_N * first.weight + second.mean_N * second.weight) / 4
    for accumulator, parameters in zip(accumulators, (here, there), strict=True):
        assert gradients_after(accumulator, parameters, averaged) == [torch.tensor([1.0]), torch.tensor([3.0])]


def fail_if_set(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        raise ZeroDivisionError


def test_gradients_are_put_back_also_after_an_error() -> None:
    parameters = parameters_of((2,), (2,))
    accumulator = GradientAccumulator(parameters, ExtraTensors())
    own = parameters[0].grad = torch.ones(2)
    accumulator.add(1)
    sevens_N = torch.full_like(accumulator.freeze().mean_N, 7.0)
    with pytest.raises(ZeroDivisionError), accumulator.layout.installed(parameters, sevens_N):
        fail_if_set(parameters[1])
    assert parameters[0].grad is own
    assert parameters[1].grad is None


def test_dropped_gradients_do_not_count() -> None:
    (parameter,) = parameters = parameters_of((2,))
    accumulator = GradientAccumulator(parameters, ExtraTensors())
    parameter.grad = torch.ones(2)
    accumulator.add(3)
    accumulator.drop()
    assert accumulator.samples == 0
    assert gradients_after(accumulator, parameters) == [None]
    parameter.grad = torch.full((2,), 5.0)
    accumulator.add(1)
    (averaged,) = gradients_after(accumulator, parameters)
    assert averaged is not None
    assert torch.equal(averaged, parameter.grad)


def test_sparse_gradients_are_added_beside_plain_ones_and_missing_ones() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    parameters = [embedding.weight, *parameters_of((2,), (3,))]
    accumulator = GradientAccumulator(parameters, ExtraTensors())
    for word in (1, 2):
        embedding.weight.grad = None
        (embedding(torch.tensor([word])) * parameters[1]).sum().backward()
        embedding(torch.tensor([word])).sum().backward()
        assert accumulator.add(1)
    averaged = gradients_after(accumulator, parameters)
    assert averaged[0] is not None
    assert averaged[0].tolist() == [[0, 0], [0.5, 0.5], [0.5, 0.5], [0, 0]]
    assert averaged[1] is not None
    assert averaged[2] is None


def test_the_accumulator_knows_its_oldest_step_and_whether_samples_were_sent_before() -> None:
    (parameter,) = parameters_of((2,))
    accumulator = GradientAccumulator([parameter], ExtraTensors())
    parameter.grad = torch.ones(2)
    for at_step in (4, 3, 5):
        accumulator.add(1, at_step=at_step)
    assert age_of(accumulator) == (3, 3, False)
    contribution = accumulator.freeze()
    assert contribution.since_step == 3
    accumulator.take_back(contribution)
    assert age_of(accumulator) == (3, 3, True)
    accumulator.drop()
    accumulator.add(1, 0.0, at_step=7)
    assert age_of(accumulator) == (1, 7, False)


def test_a_contribution_that_is_taken_back_is_added_to_later_batches() -> None:
    (parameter,) = parameters_of((2,))
    accumulator = GradientAccumulator([parameter], ExtraTensors())
    parameter.grad = torch.ones(2)
    accumulator.add(1, at_step=3)
    contribution = accumulator.freeze()
    parameter.grad = torch.full((2,), 5.0)
    accumulator.add(3, at_step=4)
    accumulator.take_back(contribution)
    assert age_of(accumulator) == (4, 3, True)
    merged = accumulator.freeze()
    assert (merged.samples, merged.weight, merged.since_step) == (4, 4.0, 3)
    assert merged.mean_N.tolist() == [4.0, 4.0, 1.0]


@pytest.mark.parametrize("is_made", [True, False])
def test_two_vectors_are_enough_for_a_peer_that_computes_during_a_step(is_made: bool) -> None:
    (parameter,) = parameters_of((2,))
    accumulator = GradientAccumulator([parameter], ExtraTensors())
    vectors = set()
    for step in range(4):
        parameter.grad = torch.full((2,), 5.0)
        accumulator.add(3, at_step=step)
        contribution = accumulator.freeze()
        vectors.add(contribution.mean_N.data_ptr())
        parameter.grad = torch.ones(2)
        accumulator.add(1, at_step=step)
        accumulator.release(contribution, is_free=True) if is_made else accumulator.take_back(contribution)
    assert len(vectors) <= 2


def test_one_vector_is_enough_for_a_peer_that_does_not_compute_during_a_step() -> None:
    (parameter,) = parameters_of((2,))
    accumulator = GradientAccumulator([parameter], ExtraTensors())
    parameter.grad = torch.ones(2)
    vectors = set()
    for step in range(3):
        accumulator.add(1, at_step=step)
        accumulator.add(1, at_step=step + 1)  # as after others made a step without it
        assert age_of(accumulator) == (2, step, False)
        contribution = accumulator.freeze()
        vectors.add(contribution.mean_N.data_ptr())
        accumulator.release(contribution, is_free=True)
    assert len(vectors) == 1
