"""What a result says of contributions that were cut off."""

from __future__ import annotations

import torch

from manyhands.averaging.averager import _result_of
from manyhands.averaging.grid.step import StepOutcome
from manyhands.averaging.messages import SpanResult
from manyhands.averaging.rounds import CommittedRound
from tests.unit.averaging.groups import group_of, peer

PARTS = [
    SpanResult(0, 10, 0, [3]),
    SpanResult(10, 20, 1, []),
    SpanResult(20, 30, 2, [3]),
    SpanResult(30, 40, 0, [1, 3]),
    SpanResult(40, 50, 1, [3]),
]


def test_a_manifest_says_to_which_parts_a_member_contributed_whose_values_were_cut() -> None:
    manifest = group_of(4, weights=[1.0, 2.0, 3.0, 4.0]).manifest(b"digest", PARTS)
    assert manifest.weights == [1.0, 2.0, 3.0, 4.0]
    assert manifest.cut() == {peer(1): [(0, 30), (40, 50)], peer(3): [(10, 20)]}


def test_a_member_that_contributed_nothing_or_everything_is_not_cut() -> None:
    group = group_of(3, weights=[1.0, 0.0, 1.0])
    assert group.manifest(b"digest").cut() == {}
    assert group.manifest(b"digest", [SpanResult(0, 10, 0, [1, 2]), SpanResult(10, 20, 0, [1, 2])]).cut() == {}


def test_a_round_result_says_which_values_were_cut() -> None:
    manifest = group_of(4).manifest(b"digest", PARTS)
    result = _result_of(StepOutcome(CommittedRound(torch.zeros(50), manifest, 0.5)))
    assert result.contributors == {peer(rank): 1.0 for rank in range(4)}
    assert result.cut == {peer(1): [(0, 30), (40, 50)], peer(3): [(10, 20)]}
    assert _result_of(StepOutcome()).cut == {}
