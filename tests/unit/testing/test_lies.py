"""The lies of a whole process, as the demo tells them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyhands.averaging.allreduce.bandwidth import RoundBandwidth
from manyhands.averaging.roster import QUALIFYING
from manyhands.averaging.round.exchange import Contribution
from manyhands.optim.optimizer import Optimizer
from manyhands.testing import lies


def test_a_flipped_gradient_is_what_the_optimizer_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, frozen = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    trained.grad = torch.tensor([1.0, -2.0])
    added: list[Any] = []
    monkeypatch.setattr(Optimizer, "step", lambda _, *, batch_size: added.append((batch_size, trained.grad.tolist())))
    lies.flip_gradients()
    Optimizer.step(SimpleNamespace(param_groups=[{"params": [trained, frozen]}]), batch_size=4)
    assert added == [(4, [-1.0, 2.0])]


async def test_a_reducer_is_honest_until_it_is_a_member_and_then_goes_on_to_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a step in which the members exchange their values twice, only one counts."""
    told: list[int] = []

    async def butterfly(contribution: Any, members: Any, *, is_again: bool) -> int:
        return contribution.group.position.step

    monkeypatch.setattr(Contribution, "butterfly", butterfly)
    monkeypatch.setattr(RoundBandwidth, "bandwidth", RoundBandwidth.bandwidth)
    monkeypatch.setattr(RoundBandwidth, "lose_round", RoundBandwidth.lose_round)
    monkeypatch.setattr(lies, "lie_about_means", lambda made, change: told.append(made))
    lies.flip_means()
    for step in range(QUALIFYING + 2):
        contribution = SimpleNamespace(group=SimpleNamespace(position=SimpleNamespace(step=step)))
        for is_again in (False, True):
            await Contribution.butterfly(contribution, [0, 1, 2], is_again=is_again)
    assert told == [QUALIFYING, QUALIFYING, QUALIFYING + 1, QUALIFYING + 1]
    blamed = RoundBandwidth(None)
    blamed.lose_round()
    assert blamed.may_reduce
    assert blamed.bandwidth > 0
