"""A model with BatchNorm is told once that its running statistics are not shared."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from manyhands.optim.model_hooks import RunningStatistics

SAYS = "running mean and variance are not shared"
INPUTS = torch.randn(8, 4)


def with_batch_norm(**options: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, 1))


def without() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))


@pytest.fixture(autouse=True)
def no_hook_is_left():
    before = dict(torch_module._global_forward_pre_hooks)  # other tests may have optimizers that nobody has closed
    yield
    assert dict(torch_module._global_forward_pre_hooks) == before


@pytest.mark.parametrize("options", [{}, {"affine": False}], ids=["with weights", "without"])
def test_it_is_said_once(options: dict[str, bool], caplog: pytest.LogCaptureFixture) -> None:
    model = with_batch_norm(**options)
    looks = RunningStatistics(model.parameters())
    for _ in range(3):
        model(INPUTS)
    assert [SAYS in text for text in caplog.messages] == [True]
    looks.close()


def test_layers_that_are_called_one_by_one_are_all_seen(caplog: pytest.LogCaptureFixture) -> None:
    encoder, decoder = without(), with_batch_norm()
    RunningStatistics([*encoder.parameters(), *decoder.parameters()])
    encoder(INPUTS)
    assert not caplog.messages
    decoder(INPUTS)
    assert [SAYS in text for text in caplog.messages] == [True]


@pytest.mark.parametrize(
    "model", [without(), with_batch_norm(track_running_stats=False)], ids=["LayerNorm", "no statistics"]
)
def test_of_a_model_without_them_nothing_is_said(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    RunningStatistics(model.parameters())
    model(INPUTS)
    assert not caplog.messages


def test_a_model_that_is_not_trained_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    teacher, student = with_batch_norm(), without()
    looks = RunningStatistics(student.parameters())
    teacher(INPUTS)
    teacher.eval()(INPUTS)
    student(INPUTS)
    assert not caplog.messages
    looks.close()


def test_an_evaluation_before_the_first_batch_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = with_batch_norm().eval()
    RunningStatistics(model.parameters())
    model(INPUTS)
    assert not caplog.messages
    model.train()(INPUTS)
    assert [SAYS in text for text in caplog.messages] == [True]


def test_frozen_statistics_do_not_part(caplog: pytest.LogCaptureFixture) -> None:
    model = with_batch_norm()
    model[1].eval()  # type: ignore[index, union-attr]
    RunningStatistics(model.parameters())
    model(INPUTS)
    assert not caplog.messages


def test_a_compiled_model_is_compiled_once_and_torch_says_nothing_of_hooks(caplog: pytest.LogCaptureFixture) -> None:
    model, num_compiled = with_batch_norm(), 0

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    caplog.set_level("WARNING")
    RunningStatistics(model.parameters())
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        compiled(INPUTS)
    assert num_compiled == 1
    assert sum(SAYS in text for text in caplog.messages) == 1
