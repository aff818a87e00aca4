"""The figures and arms of benchmarks/local_steps.py, on numbers that can be checked by hand."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _local_arms import Rule, Seen, Sender, average, orthogonal
from local_steps import KEY, extra_tokens

from manyhands.averaging.codecs import Sparse


def row(mode: str, steps: int, loss: float) -> dict[str, Any]:
    known: dict[str, Any] = dict.fromkeys(KEY, 0) | {"mode": mode, "steps": steps, "codec": "none", "shards": "iid"}
    return known | {"heldout_loss": loss, "tokens": 100 * steps}


def test_extra_tokens_are_those_beyond_what_one_process_takes_to_the_same_loss() -> None:
    ones = [row("one", steps, loss) for steps, loss in ((100, 8.0), (200, 4.0), (400, 2.0))]
    local = row("arm-plain", 400, 4.0)
    assert extra_tokens([local], [*ones, local]) == pytest.approx(1.0)
    between = row("arm-plain", 400, 8.0 / math.sqrt(2))
    assert extra_tokens([between], ones) == pytest.approx(4 / math.sqrt(2) - 1)
    assert extra_tokens([row("arm-plain", 400, 9.0)], ones) is None, "one process was never so bad"
    assert extra_tokens(ones[:1], ones) is None


def linear(value: float) -> torch.nn.Module:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def changed_by(*changes: tuple[float, float]) -> list[torch.nn.Module]:
    peers = [linear(1.0) for _ in changes]
    for peer, change in zip(peers, changes, strict=True):
        with torch.no_grad():
            next(peer.parameters()).sub_(torch.tensor([change]))
    return peers


def test_the_restored_mean_has_the_mean_of_the_norms_and_the_direction_of_the_mean() -> None:
    agreed, peers, seen = linear(1.0), changed_by((0.4, 0.0), (0.0, 0.4)), Seen()
    average(Rule(restores_norm=True, parts=(1, 1)), agreed, peers, [0.5, 0.5], seen)
    gradient = next(agreed.parameters()).grad
    assert gradient is not None
    torch.testing.assert_close(gradient, torch.full((1, 2), 0.4 / math.sqrt(2)))
    assert seen.ratios == pytest.approx([1 / math.sqrt(2)])
    assert seen.cosines == pytest.approx([0.0], abs=1e-6)


def test_peers_with_sparse_changes_send_the_largest_values_and_the_others_with_the_next_change() -> None:
    sparse = Sparse(top=1, chunk=4096, bits=2, decay=1.0)
    agreed, peers = torch.nn.Linear(64, 64, bias=False), [torch.nn.Linear(64, 64, bias=False)]
    peers[0].load_state_dict(agreed.state_dict())
    with torch.no_grad():
        peers[0].weight[0, 0] -= 4.0
        peers[0].weight[0, 1] -= 2.0
    rule = Rule(sparse=sparse, parts=(1,))
    sender = Sender(agreed, rule)
    for place, value in ((0, 4.0), (1, 4.0)):  # the second time 2 more were kept from the first one
        average(rule, agreed, peers, [1.0], Seen(), [sender])
        assert agreed.weight.grad is not None
        assert agreed.weight.grad.count_nonzero() == 1
        assert agreed.weight.grad[0, place].item() == pytest.approx(value, rel=0.01)
        with torch.no_grad():
            peers[0].weight[0, 0] = agreed.weight[0, 0]


def test_unequal_batches_have_as_many_samples_together_and_weigh_by_their_rule() -> None:
    parts = (1, 1, 2, 4)
    assert Rule(parts=parts).sizes(8) == [4, 4, 8, 16]
    assert Rule(parts=parts).weights(8) == [0.125, 0.125, 0.25, 0.5]
    assert Rule(parts=parts, squared=True).weights(8) == pytest.approx([1 / 22, 1 / 22, 4 / 22, 16 / 22])


def test_the_outer_rate_falls_late() -> None:
    rule = Rule(rate=2.0, falls_to=0.5)
    assert [rule.rate_at(number, 10) for number in (1, 7, 10)] == pytest.approx([2.0, 2.0, 1.0])


def test_muon_makes_the_singular_values_about_equal() -> None:
    values = torch.linalg.svdvals(orthogonal(torch.diag(torch.tensor([4.0, 1.0, 2.0]))[:2]))
    assert bool(((values > 0.6) & (values < 1.3)).all())
