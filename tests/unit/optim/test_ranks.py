"""The ranks of one peer, as values, and where there are none; tests/process/test_ranks.py has jobs."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

import manyhands
from manyhands.base.errors import ConfigError
from manyhands.optim.process_group import StepArguments, added_up, unequal
from manyhands.optim.ranks import CallOutcome
from manyhands.optim.step.global_step import Statistics


def test_the_batches_of_all_ranks_are_one() -> None:
    assert added_up([StepArguments(3, None), StepArguments(5, None)]) == (8, None)
    assert added_up([StepArguments(3, 10.5), StepArguments(5, 0.0)]) == (8, 10.5)
    assert added_up([StepArguments(0, None)]) == (0, None)


@pytest.mark.parametrize("rank", range(3))
def test_a_wrong_argument_on_one_rank_is_wrong_for_all_ranks(rank: int) -> None:
    def with_one(wrong: StepArguments) -> list[StepArguments]:
        return [wrong if number == rank else StepArguments(4, 4.0) for number in range(3)]

    with pytest.raises(ConfigError, match="a batch size was given on 2 of 3 ranks"):
        added_up(with_one(StepArguments(None, 4.0)))
    assert added_up([StepArguments(None, 4.0)] * 3) == (None, None), "the optimizer asks for a batch size"
    assert added_up(with_one(StepArguments(-1, 4.0)))[0] == -1
    assert added_up(with_one(StepArguments(4, -2.0)))[1] == -2.0
    weight = added_up(with_one(StepArguments(4, math.nan)))[1]
    assert weight is not None
    assert math.isnan(weight)
    with pytest.raises(ConfigError, match="weight was given on 2 of 3 ranks"):
        added_up(with_one(StepArguments(4, None)))


def test_batches_of_different_sizes_are_hinted_at() -> None:
    assert unequal([StepArguments(3, None), StepArguments(3, None)]) == ""
    assert unequal([StepArguments(3, 4.0), StepArguments(5, 4.0)]) == "", (
        "the loss is a mean over what the weight counts"
    )
    assert "batches of 3, 5, but" in unequal([StepArguments(3, None), StepArguments(5, None)])
    assert "batches of 7.5, 4, but" in unequal([StepArguments(3, 7.5), StepArguments(3, 4.0)])


def test_outcomes_and_errors_of_calls_survive_pickling() -> None:
    outcome = CallOutcome(None, True, {"global_step": 3, "statistics": Statistics(samples_used=5)})
    assert pickle.loads(pickle.dumps(outcome)) == outcome
    error = pickle.loads(pickle.dumps(CallOutcome(error=ConfigError("rank 0 failed: x=1")))).error
    assert (type(error), str(error)) == (ConfigError, "rank 0 failed: x=1")


def test_a_process_by_itself_is_told_to_use_the_other_optimizer() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match=r"start the program with torchrun .* manyhands\.Optimizer only"):
        manyhands.ProcessGroupOptimizer(inner, peer=None, run_id="run", target_batch_size=8)
