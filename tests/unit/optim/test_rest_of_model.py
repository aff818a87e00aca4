"""The digest of what a model has beside its optimizer's parameters: equal for equal values, whatever holds them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.base.errors import ConfigError
from manyhands.optim import rest_of_model
from manyhands.optim.manifest import REST_OF_MODEL
from manyhands.optim.model_checks import models_of
from manyhands.optim.rest_of_model import facts_of_rest, warn_of_rest


def with_base(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).to(dtype)
    return nn.Sequential(base, nn.Linear(4, 2))


def fact(model: nn.Module, head: nn.Module | None = None) -> str:
    """The fact of a model whose optimizer has the head only."""
    return facts_of_rest(model, (head if head is not None else model[1]).parameters())[REST_OF_MODEL]  # type: ignore[index]


def change_a_value(model: Any) -> None:
    with torch.no_grad():
        model[0][0].weight[-1, -1] += 1e-6


def change_a_name(model: Any) -> None:
    layer = model[0][2]
    layer.other = layer.weight
    del layer.weight


def exchange_two_values(model: Any) -> None:
    with torch.no_grad():
        model[0][0].bias.copy_(model[0][0].bias.flip(0))


@pytest.mark.parametrize("change", [change_a_value, change_a_name, exchange_two_values])
def test_another_frozen_base_has_another_digest(change: Callable[[nn.Module], None]) -> None:
    model = with_base()
    assert fact(model) == fact(with_base())
    assert fact(model).startswith("6 tensors of digest ")
    change(model)
    assert fact(model) != fact(with_base())
    assert fact(with_base(torch.bfloat16)) != fact(with_base())


def test_the_digest_depends_on_the_values_and_not_on_layout_wrapping_or_requires_grad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, expected = with_base(), fact(with_base())
    model[0].requires_grad_(requires_grad=False)
    assert fact(model) == expected
    model[0](torch.randn(8, 4))  # the running statistics change
    assert fact(model) == expected
    first: Any = model[0][0]  # type: ignore[index]
    first.weight.data = first.weight.data.t().contiguous().t()
    assert fact(model) == expected
    assert fact(nn.ModuleDict({"_orig_mod": model}), model[1]) == expected, "as torch.compile names it"
    assert fact(nn.ModuleDict({"module": model}), model[1]) == expected, "as DistributedDataParallel names it"
    monkeypatch.setattr(rest_of_model, "HASHED_BYTES", 12)
    assert fact(model) == expected


def test_values_on_the_meta_device_are_left_out_of_the_digest() -> None:
    model = with_base()
    model[0].to("meta")
    other = with_base()
    change_a_value(other)
    other[0].to("meta")
    assert fact(model) == fact(other)


def test_an_optimizer_that_has_all_parameters_adds_no_fact() -> None:
    model = with_base()
    assert facts_of_rest(model, model.parameters()) == {}
    assert facts_of_rest(None, model.parameters()) == {}


def test_a_model_argument_without_the_optimizers_parameters_is_refused() -> None:
    model: Any = with_base()
    with pytest.raises(ConfigError, match=r"model is of type list; give the torch\.nn\.Module"):
        facts_of_rest([model], model.parameters())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model, a Linear, has none of the optimizer's parameters"):
        facts_of_rest(model[0][0], model[1].parameters())


def test_without_the_model_a_warning_says_what_to_write(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    model: Any = with_base()
    for parameters in ([*model.parameters()], [*nn.Linear(2, 2).parameters()]):
        warn_of_rest(models_of(parameters), parameters)
    assert not caplog.messages
    parameters = [*model[1].parameters()]
    warn_of_rest(models_of(parameters), parameters)
    (text,) = caplog.messages
    assert text.startswith(
        "The model has 6 parameters that the optimizer does not have (0.0.bias, 0.0.weight, 0.1.bias, ...)"
    )
    assert text.endswith("manyhands.Optimizer(..., model=model)")
