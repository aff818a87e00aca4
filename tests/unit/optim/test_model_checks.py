"""A model with BatchNorm is told once that its running statistics are not shared."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from manyhands.optim.model_checks import warn_of_running_statistics

SAYS = "running mean and variance are not shared"


def with_batch_norm(**options: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, 1))


def without() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def is_told(model: nn.Module, caplog: pytest.LogCaptureFixture, *others: nn.Module) -> bool:
    """Whether the optimizer of a model says it, while there are others."""
    gc.collect()
    caplog.clear()
    warn_of_running_statistics(model.parameters())
    said = [SAYS in text for text in caplog.messages]
    assert said in ([], [True]), "once"
    return bool(said)


@pytest.mark.parametrize("options", [{}, {"affine": False}], ids=["with weights", "without"])
def test_it_is_said_once(options: dict[str, bool], caplog: pytest.LogCaptureFixture) -> None:
    assert is_told(with_batch_norm(**options), caplog)


def test_models_that_are_called_one_by_one_are_all_seen(caplog: pytest.LogCaptureFixture) -> None:
    encoder, decoder = without(), with_batch_norm()
    warn_of_running_statistics([*encoder.parameters(), *decoder.parameters()])
    assert [SAYS in text for text in caplog.messages] == [True]


def test_of_a_model_without_them_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert not is_told(without(), caplog)
    assert not is_told(with_batch_norm(track_running_stats=False), caplog)


def test_a_model_that_is_not_trained_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    assert not is_told(without(), caplog, with_batch_norm())


def test_a_model_that_is_in_eval_mode_when_the_optimizer_is_made_counts(caplog: pytest.LogCaptureFixture) -> None:
    assert is_told(with_batch_norm().eval(), caplog)


def test_frozen_statistics_do_not_part(caplog: pytest.LogCaptureFixture) -> None:
    model = with_batch_norm()
    model[1].eval()  # type: ignore[index, union-attr]
    assert not is_told(model, caplog)


def test_a_frozen_part_that_still_follows_its_batches_counts(caplog: pytest.LogCaptureFixture) -> None:
    body, head = with_batch_norm(), nn.Linear(1, 1)
    model = nn.Sequential(body.requires_grad_(False), head)
    assert is_told(head, caplog, model)


def test_a_module_whose_constructor_failed_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    half_made = nn.Linear.__new__(nn.Linear)  # type: ignore[no-untyped-call]
    assert is_told(with_batch_norm(), caplog, half_made)


def test_a_compiled_model_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    assert is_told(torch.compile(with_batch_norm(), backend="eager"), caplog)  # type: ignore[arg-type]
