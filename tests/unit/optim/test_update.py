from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.optim.flat import GradientLayout, are_finite
from manyhands.optim.update import LARGE_NORM, global_norm, guarded_step


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


def step(optimizer: torch.optim.Optimizer, averaged_N: torch.Tensor, **options: Any) -> str:
    parameters = optimizer.param_groups[0]["params"]
    layout = GradientLayout(parameters)
    return guarded_step(
        optimizer, parameters, layout, averaged_N, **{"max_grad_norm": None, "spare_N": None, **options}
    )


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


@pytest.mark.parametrize("has_spare", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_an_update_that_is_not_finite_is_taken_back(has_spare: bool, dtype: torch.dtype) -> None:
    parameters = new_parameters(dtype)
    optimizer = Spoiler(parameters, lr=0.1)
    averaged_N = flat(parameters, 1.0)
    spare_N = torch.full_like(averaged_N, float("nan")) if has_spare else None
    with torch.no_grad():
        parameters[0].add_(1 / 3)  # not exact in fewer bits
    assert not step(optimizer, flat(parameters, 1.0))
    before = values_of(optimizer)
    optimizer.value = float("inf")
    assert "would not be finite" in step(optimizer, averaged_N, spare_N=spare_N)
    assert_same(before, values_of(optimizer))
    optimizer.value = None
    assert not step(optimizer, flat(parameters, 1.0))


def test_statistics_of_a_refused_large_gradient_are_taken_back() -> None:
    optimizer = torch.optim.SGD(new_parameters(), lr=0.1, momentum=0.9)
    assert not step(optimizer, flat(new_parameters(), 1.0))
    before = values_of(optimizer)
    optimizer.param_groups[0]["lr"] = 1e30
    assert step(optimizer, flat(new_parameters(), 10 * LARGE_NORM))
    assert_same(before, values_of(optimizer))


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


def test_norms() -> None:
    assert global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]) == pytest.approx(5.0)
    assert global_norm([]) == 0.0
    assert are_finite([])
    assert are_finite([torch.ones(3, dtype=torch.float16), torch.ones(2)])
    assert not are_finite([torch.ones(3), torch.tensor([1.0, float("nan")])])
