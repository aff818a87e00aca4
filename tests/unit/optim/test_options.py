from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.averaging.config import AveragingConfig, averaging_of
from manyhands.base.errors import ConfigError
from manyhands.optim.options import Options, checked_batch, made_optimizer, made_scheduler

GOOD: dict[str, Any] = {
    "run_id": "run", "target_batch_size": 64, "batch_size_per_step": None, "max_grad_norm": None,
    "delay": None, "offload": None, "auxiliary": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"run_id": "my.run"}, "run_id"),
        ({"run_id": 5}, "run_id is of type int; a text is needed"),
        ({"target_batch_size": 0}, "target_batch_size=0"),
        ({"target_batch_size": None}, "target_batch_size=None must be a whole number"),
        ({"target_batch_size": 64.0}, "target_batch_size=64.0 must be a whole number; for example 4096"),
        ({"target_batch_size": "64"}, "target_batch_size='64' must be a whole number"),
        ({"batch_size_per_step": 1.5}, "batch_size_per_step=1.5 must be a whole number; for example 32"),
        ({"batch_size_per_step": True}, "batch_size_per_step=True must be a whole number"),
        ({"batch_size_per_step": 0}, "batch_size_per_step=0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"max_grad_norm": "1"}, "max_grad_norm='1' must be above 0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan"),
        ({"delay": "everything"}, "delay='everything' is unknown; one of 'optimizer', 'gradients', or None"),
        ({"delay": "gradients", "offload": False}, "leave offload out"),
        ({"auxiliary": True, "batch_size_per_step": 4}, "an auxiliary peer has no batches"),
    ],
)
def test_bad_values_are_named_with_a_good_one(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Options(**GOOD | change)


def test_a_host_copy_is_kept_where_it_is_asked_for_or_needed() -> None:
    assert not Options(**GOOD).offload
    assert not Options(**GOOD | {"offload": False}).offload
    assert Options(**GOOD | {"offload": True}).offload
    assert Options(**GOOD | {"delay": "optimizer"}).offload
    assert Options(**GOOD | {"delay": "gradients", "offload": True}).offload


def test_options_that_change_the_update_are_facts_of_the_run() -> None:
    assert Options(**GOOD).facts() == {}
    assert Options(**GOOD | {"max_grad_norm": 1}).facts() == Options(**GOOD | {"max_grad_norm": 1.0}).facts() != {}


def test_the_times_of_a_round_may_be_given_by_themselves() -> None:
    config = averaging_of(None, 3.0, 20.0)
    assert config == dataclasses.replace(AveragingConfig(), matchmaking_time_s=3.0, averaging_timeout_s=20.0)
    given = AveragingConfig(codec="fp16")
    assert averaging_of(given, None, None) == given
    with pytest.raises(ConfigError, match="matchmaking_time_s belong in averaging"):
        averaging_of(given, 3.0, None)
    with pytest.raises(ConfigError, match="the search for a group must outlast"):
        averaging_of(None, 70.0, None)


def test_integers_of_other_libraries_are_integers() -> None:
    """The manifest and the records of a run cannot hold numpy's."""
    options = Options(**GOOD | {"target_batch_size": np.int64(64), "batch_size_per_step": torch.tensor(8)})
    assert [type(count) for count in (options.target_batch_size, options.batch_size_per_step)] == [int, int]
    assert type(checked_batch(torch.tensor(4), torch.tensor(120.0))) is int  # type: ignore[arg-type]


BAD_BATCHES: list[dict[str, Any]] = [
    {"batch_size": None}, {"batch_size": -1}, {"batch_size": 1.5}, {"batch_size": "8"}, {"weight": -1.0},
    {"weight": float("nan")}, {"weight": "8"},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_BATCHES)
def test_a_batch_needs_its_size(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"batch_size=|weight="):
        checked_batch(**{"batch_size": 4, "weight": None} | bad)
    assert checked_batch(4, 120.0) == 4


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, NeedsClosure])
def test_an_optimizer_that_computes_the_loss_again_is_refused(kind: Any) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    for given, params in ((kind(parameters), None), (kind, parameters)):
        with pytest.raises(ConfigError, match=f"{kind.__name__} computes the loss again within one step"):
            made_optimizer(given, params)


def test_an_optimizer_argument_of_another_type_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    for given in (model, model.parameters(), "adam", None):
        with pytest.raises(
            ConfigError, match=f"optimizer is of type {type(given).__name__}, .*AdamW\\(model.parameters"
        ):
            made_optimizer(given, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="returned None; have it return a torch optimizer"):
        made_optimizer(lambda params: None, model.parameters())  # type: ignore[arg-type,return-value]


def test_a_scheduler_that_would_change_nothing_is_refused() -> None:
    """A function without ``return``, and the schedule of another optimizer, once left the rate constant in silence."""
    inner, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    with pytest.raises(ConfigError, match=r"scheduler is a function that returned None, .*CosineAnnealingLR"):
        made_scheduler(lambda _: None, inner)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="scheduler is 'cosine', and a torch scheduler is needed"):
        made_scheduler("cosine", inner)  # type: ignore[arg-type]
    of_other = torch.optim.lr_scheduler.StepLR(other, 3)
    for given in (of_other, lambda _: of_other):
        with pytest.raises(ConfigError, match="the scheduler, a StepLR, changes the options of another optimizer"):
            made_scheduler(given, inner)
    own = torch.optim.lr_scheduler.StepLR(inner, 3)
    assert made_scheduler(own, inner) is made_scheduler(lambda _: own, inner) is own
    assert made_scheduler(None, inner) is None
