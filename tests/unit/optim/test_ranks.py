"""The ranks of a job, where there are none; tests/process/test_ranks.py has jobs."""

from __future__ import annotations

import pytest
import torch

import manyhands
from manyhands.base.errors import ConfigError


def test_a_process_by_itself_is_told_to_use_the_other_optimizer() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match=r"start the program with torchrun .* manyhands\.Optimizer only"):
        manyhands.ProcessGroupOptimizer(inner, peer=None, run_id="run", target_batch_size=8)
