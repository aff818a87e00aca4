from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.optim.flat import GradientLayout, are_finite
from manyhands.optim.lamb import Lamb
from manyhands.optim.step.replica import LARGE, _is_surely_finite, global_norm, guarded_step


class Spoiler(torch.optim.SGD):
    """Sets a parameter to what it is told."""

    value: float | None = None

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.value is not None:
            with torch.no_grad():
                self.param_groups[0]["params"][1][0] = self.value


def new_parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2, 3, dtype=dtype)), torch.nn.Parameter(torch.ones(2, dtype=dtype))]


def flat(parameters: list[torch.nn.Parameter], value: float) -> torch.Tensor:
    return torch.cat([torch.full((sum(p.numel() for p in parameters),), value), torch.ones(len(parameters))])


def step(optimizer: torch.optim.Optimizer, averaged_N: torch.Tensor, max_grad_norm: float | None = None) -> str:
    parameters = optimizer.param_groups[0]["params"]
    return guarded_step(optimizer, parameters, GradientLayout(parameters), averaged_N, max_grad_norm)


def values_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    packed = optimizer.state_dict()["state"]
    statistics = [
        torch.as_tensor(value).clone()
        for index in sorted(packed)
        for value in packed[index].values()
        if value is not None
    ]
    return [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]] + statistics


def assert_same(before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    assert len(before) == len(after)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("bad", "where"),
    [(bad, where) for bad in (float("nan"), float("inf"), -float("inf")) for where in (0, 7, 9)]
    + [(1e30, 0), (1e30, 7)],
)
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, where: int) -> None:
    optimizer = torch.optim.AdamW(new_parameters(), lr=0.1)
    assert not step(optimizer, flat(new_parameters(), 1.0))
    before = values_of(optimizer)
    averaged_N = flat(new_parameters(), 1.0)
    averaged_N[where] = bad
    assert "not finite" in step(optimizer, averaged_N)
    assert_same(before, values_of(optimizer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_an_update_that_is_not_finite_is_taken_back(dtype: torch.dtype) -> None:
    parameters = new_parameters(dtype)
    optimizer = Spoiler(parameters, lr=0.1)
    averaged_N = flat(parameters, 1.0)
    with torch.no_grad():
        parameters[0].add_(1 / 3)  # not exact in fewer bits
    assert not step(optimizer, flat(parameters, 1.0))
    before = values_of(optimizer)
    optimizer.value = float("inf")
    assert "would not be finite" in step(optimizer, averaged_N)
    assert_same(before, values_of(optimizer))
    optimizer.value = None
    assert not step(optimizer, flat(parameters, 1.0))


def test_statistics_of_a_refused_large_gradient_are_taken_back() -> None:
    optimizer = torch.optim.SGD(new_parameters(), lr=0.1, momentum=0.9)
    assert not step(optimizer, flat(new_parameters(), 1.0))
    before = values_of(optimizer)
    optimizer.param_groups[0]["lr"] = 1e30
    assert step(optimizer, flat(new_parameters(), 1e11))
    assert_same(before, values_of(optimizer))


class Careless(torch.optim.AdamW):
    """Spoils a parameter after a step like any other."""

    is_careless = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.is_careless:
            with torch.no_grad():
                self.param_groups[0]["params"][1][0] = float("nan")


def test_statistics_of_any_refused_update_are_taken_back() -> None:
    optimizer = Careless(new_parameters(), lr=0.1)
    averaged_N = flat(new_parameters(), 1.0)
    assert not step(optimizer, averaged_N.clone())
    before = values_of(optimizer)
    optimizer.is_careless = True
    assert "would not be finite" in step(optimizer, averaged_N.clone())
    assert_same(before, values_of(optimizer))
    optimizer.is_careless = False
    undisturbed = torch.optim.AdamW(new_parameters(), lr=0.1)
    for _ in range(2):
        assert not step(undisturbed, averaged_N.clone())
    assert not step(optimizer, averaged_N.clone())
    assert_same(values_of(undisturbed), values_of(optimizer))


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        (torch.optim.AdamW, "lr", 1e39),
        (torch.optim.AdamW, "lr", float("nan")),
        (torch.optim.Adam, "eps", 0.0),
        (torch.optim.SGD, "weight_decay", 1e39),
        (torch.optim.Adam, "weight_decay", 1e39),
        (torch.optim.SGD, "lr", 1e39),
        (torch.optim.RMSprop, "lr", 1e39),
        (Lamb, "lr", 1e39),
    ],
)
def test_options_with_which_an_update_is_not_finite_spoil_no_statistics(make: Any, option: str, value: float) -> None:
    optimizer = make(new_parameters(), lr=0.1)
    averaged_N = flat(new_parameters(), 1.0)
    averaged_N[0] = 0.0
    assert not step(optimizer, averaged_N.clone())
    before = values_of(optimizer)
    optimizer.param_groups[0][option] = value
    try:
        assert "would not be finite" in step(optimizer, averaged_N.clone())
    except RuntimeError as error:  # torch refuses some numbers itself, half-way
        assert "overflow" in str(error)  # noqa: PT017
    assert_same(before, values_of(optimizer))


def test_parameters_and_statistics_near_the_bound_are_saved() -> None:
    for large in (1e38, 3e38):
        optimizer = torch.optim.SGD(new_parameters(), lr=1e3, momentum=0.9, weight_decay=1e3)
        assert _is_surely_finite(optimizer, optimizer.param_groups[0]["params"], 1.0)
        assert not step(optimizer, flat(new_parameters(), 1.0))
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0][0, 0] = large
        before = values_of(optimizer)
        assert step(optimizer, flat(new_parameters(), 1.0))
        assert_same(before, values_of(optimizer))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, Lamb])
def test_an_ordinary_step_of_a_known_optimizer_needs_no_copy_of_its_statistics(make: Any) -> None:
    optimizer = make(new_parameters(), lr=0.1)
    for _ in range(2):
        assert _is_surely_finite(optimizer, optimizer.param_groups[0]["params"], LARGE / 2)
        assert not step(optimizer, flat(new_parameters(), 1.0))
    assert not _is_surely_finite(optimizer, optimizer.param_groups[0]["params"], LARGE * 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_only_half_precision_is_always_saved(dtype: torch.dtype) -> None:
    parameters = [*new_parameters(dtype), torch.nn.Parameter(torch.empty(0, dtype=dtype))]
    assert _is_surely_finite(torch.optim.AdamW(parameters), parameters, 1.0) == (dtype != torch.float16)


def test_the_gradients_together_are_clipped_as_torch_does() -> None:
    ours, plain = new_parameters(), new_parameters()
    generator = torch.Generator().manual_seed(1)
    for parameter in plain:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    averaged_N = torch.cat([*(p.grad.flatten() for p in plain if p.grad is not None), torch.ones(2)])
    torch.nn.utils.clip_grad_norm_(plain, 0.7)
    torch.optim.SGD(plain, lr=1.0).step()
    assert not step(torch.optim.SGD(ours, lr=1.0), averaged_N, max_grad_norm=0.7)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert averaged_N[-2:].tolist() == [1.0, 1.0], "the shares are no gradients"


def test_a_gradient_below_the_bound_is_left_as_it_is() -> None:
    parameters = new_parameters()
    assert not step(torch.optim.SGD(parameters, lr=1.0), flat(parameters, 0.01), max_grad_norm=1.0)
    assert torch.equal(parameters[0].detach(), torch.full((2, 3), 1.0) - torch.tensor(0.01))


def test_norms_and_finiteness_are_those_of_all_tensors_together() -> None:
    assert global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]) == pytest.approx(5.0)
    assert global_norm([]) == 0.0
    assert are_finite([])
    assert are_finite([torch.ones(3, dtype=torch.float16), torch.ones(2)])
    assert not are_finite([torch.ones(3), torch.tensor([1.0, float("nan")])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_whose_sum_or_squares_overflow_are_finite_themselves(dtype: torch.dtype) -> None:
    large = torch.full((3, 4), 3e38, dtype=dtype)
    assert are_finite([large])
    assert are_finite([large.t()[1:], torch.empty(0, dtype=dtype)])
    large[2, 3] = float("inf")
    assert not are_finite([large])
    assert not are_finite([large.t()])


def test_doubles_that_float32_cannot_hold_are_not_finite() -> None:
    assert not are_finite([torch.tensor([1e300], dtype=torch.float64)])
