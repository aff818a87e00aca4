from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.base.errors import ConfigError
from manyhands.optim import Lamb


def step_of_the_paper(
    x: list[float], m: list[float], v: list[float], g: list[float], t: int, *,
    lr: float, b1: float, b2: float, eps: float, wd: float, clamp: float, debias: bool,
) -> tuple[list[float], list[float], list[float]]:  # fmt: skip
    """Algorithm 2 of arXiv:1904.00962 for one layer, number by number."""
    m = [b1 * mi + (1 - b1) * gi for mi, gi in zip(m, g, strict=True)]
    v = [b2 * vi + (1 - b2) * gi * gi for vi, gi in zip(v, g, strict=True)]
    m_hat = [mi / (1 - b1**t) if debias else mi for mi in m]
    v_hat = [vi / (1 - b2**t) if debias else vi for vi in v]
    r = [mi / (math.sqrt(vi) + eps) for mi, vi in zip(m_hat, v_hat, strict=True)]
    u = [ri + wd * xi for ri, xi in zip(r, x, strict=True)]
    norm_x, norm_u = math.sqrt(sum(xi * xi for xi in x)), math.sqrt(sum(ui * ui for ui in u))
    phi = min(norm_x, clamp)
    ratio = phi / norm_u if phi > 0 and norm_u > 0 else 1.0
    return [xi - lr * ratio * ui for xi, ui in zip(x, u, strict=True)], m, v


@given(
    seed=st.integers(0, 2**32 - 1),
    wd=st.sampled_from([0.0, 0.01, 0.3]),
    clamp=st.sampled_from([0.5, 10.0, 10000.0]),
    debias=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_steps_are_those_of_the_paper(seed: int, wd: float, clamp: float, debias: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers = [torch.randn(size, generator=generator, dtype=torch.float64) for size in (1, 5, 12)]
    parameters = [torch.nn.Parameter(layer.clone()) for layer in layers]
    optimizer = Lamb(parameters, 0.1, (0.8, 0.95), 1e-6, wd, clamp_value=clamp, debias=debias)
    expected = [(layer.tolist(), [0.0] * len(layer), [0.0] * len(layer)) for layer in layers]
    for t in range(1, 6):
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            expected[index] = step_of_the_paper(
                *expected[index], parameter.grad.tolist(), t,
                lr=0.1, b1=0.8, b2=0.95, eps=1e-6, wd=wd, clamp=clamp, debias=debias,
            )  # fmt: skip
        optimizer.step()
    for parameter, (values, _, _) in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), torch.tensor(values, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_a_tensor_of_zeros_moves_by_the_learning_rate() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, -2.0, 0.0])
    Lamb([parameter], lr=0.1, eps=0.0).step()
    assert torch.equal(parameter.detach()[:2], torch.tensor([-0.1, 0.1]))


def test_lamb_trains_with_a_closure_and_with_parameters_without_gradient() -> None:
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Lamb([used, unused], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert optimizer.step(closure).item() < 2.0
    assert torch.equal(unused.detach(), torch.ones(2))
    assert unused not in optimizer.state


def test_a_saved_state_goes_on_where_it_was() -> None:
    def trained(reload_after: int | None) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.arange(4.0))
        optimizer = Lamb([parameter], lr=0.1)
        for number in range(6):
            if number == reload_after:
                saved = optimizer.state_dict()
                optimizer = Lamb([parameter], lr=99.0)
                optimizer.load_state_dict(saved)
            parameter.grad = parameter.detach() - number
            optimizer.step()
        return parameter.detach()

    assert torch.equal(trained(None), trained(3))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": -1e-9}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"clamp_value": 0.0}, "clamp_value=0.0 must be above 0"),
    ],
)
def test_bad_values_are_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Lamb([torch.nn.Parameter(torch.zeros(1))], **options)  # type: ignore[arg-type]
