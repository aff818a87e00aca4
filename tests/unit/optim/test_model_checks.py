"""A model with BatchNorm, and a loop that forgets ``zero_grad()``, are told once what to write."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from manyhands.optim.model_checks import LoopChecks, models_of, warn_of_running_statistics

SAYS = "running mean and variance are not shared"


def with_batch_norm(**options: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, 1))


def without() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def is_told(model: nn.Module, caplog: pytest.LogCaptureFixture, *others: nn.Module) -> bool:
    """Whether the optimizer of a model says it, while there are others."""
    gc.collect()
    caplog.clear()
    warn_of_running_statistics(models_of(model.parameters()))
    said = [SAYS in text for text in caplog.messages]
    assert said in ([], [True]), "once"
    return bool(said)


@pytest.mark.parametrize("options", [{}, {"affine": False}], ids=["with weights", "without"])
def test_batch_norm_statistics_that_do_not_travel_are_told(
    options: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    assert is_told(with_batch_norm(**options), caplog)


def test_models_that_are_called_one_by_one_are_all_seen(caplog: pytest.LogCaptureFixture) -> None:
    encoder, decoder = without(), with_batch_norm()
    warn_of_running_statistics(models_of([*encoder.parameters(), *decoder.parameters()]))
    assert [SAYS in text for text in caplog.messages] == [True]


def test_a_model_without_batch_norm_statistics_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert not is_told(without(), caplog)
    assert not is_told(with_batch_norm(track_running_stats=False), caplog)


def test_a_model_that_is_not_trained_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    assert not is_told(without(), caplog, with_batch_norm())


def test_a_model_that_is_in_eval_mode_when_the_optimizer_is_made_counts(caplog: pytest.LogCaptureFixture) -> None:
    assert is_told(with_batch_norm().eval(), caplog)


def test_a_model_with_frozen_batch_norm_statistics_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
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


# gradients that count again


def zero_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.zero_()


def zero_without_grad(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()


def write_own(model: nn.Module) -> None:
    """As a loop with ``torch.autograd.grad`` does."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def backward(model: nn.Module, times: int = 1) -> None:
    for _ in range(times):
        model(torch.ones(2, 4)).sum().backward()


def forgets(
    clean: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture, *, times: int = 1, late: bool = False
) -> bool:
    """Whether a loop of six steps is told that it forgets ``zero_grad()``.

    Args:
        clean: what it does after each step; with ``late`` before the backward passes that count, and after others.
    """
    model = without()
    kept = LoopChecks(list(model.parameters()))
    for step in range(6):
        if late and step:
            backward(model)  # of the loss of another network, say
            clean(model)
        backward(model, times)
        kept.check_kept()
        kept.note_counted()
        if not late:
            clean(model)
    kept.close()
    assert len(caplog.messages) <= 1, "once"
    return any("optimizer.zero_grad()" in text for text in caplog.messages)


@pytest.mark.parametrize("times", [1, 3])
def test_a_forgotten_zero_grad_is_told_once(times: int, caplog: pytest.LogCaptureFixture) -> None:
    assert forgets(lambda model: None, caplog, times=times)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "clean",
    [
        lambda model: model.zero_grad(),
        lambda model: model.zero_grad(set_to_none=False),
        zero_data,
        zero_without_grad,
        write_own,
    ],
    ids=["zero_grad", "zero_grad in place", "the data", "without grad", "other gradients"],
)
def test_a_loop_that_removes_its_gradients_is_told_nothing(
    clean: Callable[[nn.Module], None], late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for times in (1, 3):
        assert not forgets(clean, caplog, times=times, late=late)


def test_gradients_that_have_not_counted_yet_may_be_added_to(caplog: pytest.LogCaptureFixture) -> None:
    model = without()
    kept = LoopChecks(list(model.parameters()))
    for step in range(12):
        backward(model)
        if step % 3 == 2:  # the loop accumulates three batches itself
            kept.check_kept()
            kept.note_counted()
            model.zero_grad()
    assert not caplog.messages


def test_a_loop_without_backward_passes_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = without()
    kept = LoopChecks(list(model.parameters()))
    for _ in range(6):
        loss = model(torch.ones(2, 4)).sum()
        for parameter, grad in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
            parameter.grad = grad if parameter.grad is None else parameter.grad.copy_(grad)
        kept.check_kept()
        kept.note_counted()
    assert not caplog.messages
