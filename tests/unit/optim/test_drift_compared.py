"""Who holds what the majority holds, by what peers have told."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.sketch import MAX_SKETCH_BYTES, packed
from manyhands.base.identity import PeerId
from manyhands.optim.run.drift import (
    BOUND,
    HALF_BOUND,
    UNKNOWN_BOUND,
    bound_of,
    compared,
)
from manyhands.optim.run.signed_sums import sketch_of

PEERS = [PeerId(f"peer{number}") for number in range(9)]
OWN = PEERS[0]


def telling(*values: float) -> dict[PeerId, bytes]:
    """Each tells one number, 16 times."""
    return {peer_id: packed([value] * 16) for peer_id, value in zip(PEERS, values, strict=False)}


def test_the_bound_is_that_of_the_coarsest_parameters() -> None:
    adamw = torch.optim.AdamW
    assert bound_of([], adamw) == bound_of([torch.float32], adamw) == BOUND
    assert bound_of([torch.float64, torch.float32], adamw) == BOUND
    assert bound_of([torch.float32, torch.bfloat16], adamw) == bound_of([torch.float16], adamw) == HALF_BOUND


def test_the_bound_is_wide_where_nothing_is_known_of_the_optimizer() -> None:
    class Own(torch.optim.AdamW):
        pass

    assert bound_of([torch.float32], Own) == bound_of([torch.float32], torch.optim.NAdam) == UNKNOWN_BOUND
    assert bound_of([torch.bfloat16], Own) == HALF_BOUND


def test_one_who_is_far_off_is_not_of_the_majority() -> None:
    comparison = compared(telling(1.0, 1.0, 1.5, 1.0 + BOUND / 2), OWN, 4, BOUND)
    assert comparison is not None
    assert comparison.majority == {PEERS[0], PEERS[1], PEERS[3]}
    assert comparison.apart[PEERS[2]] == pytest.approx(0.5, rel=0.01)


def test_of_two_none_is_the_majority() -> None:
    comparison = compared(telling(1.0, 1.5), OWN, 2, BOUND)
    assert comparison is not None
    assert comparison.majority == frozenset()
    assert comparison.apart == {PEERS[0]: 0.0, PEERS[1]: pytest.approx(0.5)}


def test_those_who_have_told_nothing_count_as_well() -> None:
    """So two that lie make nobody load what they want, before the others have told."""
    assert compared(telling(1.0, 2.0, 2.0), OWN, 6, BOUND) is None
    few = compared(telling(1.0, 2.0, 2.0), OWN, 5, BOUND)
    assert few is not None
    assert few.majority == frozenset()
    assert compared(telling(1.0), OWN, 1, BOUND) is None


def test_who_has_told_nothing_itself_sees_a_majority_or_nothing() -> None:
    others = dict(list(telling(0.0, 1.0, 1.0, 1.0, 3.0).items())[1:])
    comparison = compared(others, OWN, 5, BOUND)
    assert comparison is not None
    assert comparison.majority == {*PEERS[1:4]}
    assert compared(dict(list(telling(0.0, 1.0, 2.0).items())[1:]), OWN, 3, BOUND) is None


@pytest.mark.parametrize("strange", [b"", b"abc", packed([1.0])])
def test_what_makes_no_sense_has_told_nothing(strange: bytes) -> None:
    comparison = compared(telling(1.0, 1.0, 1.0) | {PEERS[3]: strange}, OWN, 4, BOUND)
    assert comparison is not None
    assert PEERS[3] not in comparison.apart
    assert len(comparison.majority) == 3


@pytest.mark.parametrize("number", [0, 3], ids=["own", "another's"])
@pytest.mark.parametrize("strange", [packed([math.nan] * 16), packed([1e300] * 16), packed([1.0] * 15 + [math.inf])])
def test_what_is_not_finite_is_infinitely_far_off(strange: bytes, number: int) -> None:
    comparison = compared(telling(1.0, 1.0, 1.0, 1.0) | {PEERS[number]: strange}, OWN, 4, BOUND, own_size=math.nan)
    assert comparison is not None
    assert comparison.apart[PEERS[number]] == math.inf
    assert comparison.majority == {*PEERS[:4]} - {PEERS[number]}


def test_what_is_not_finite_is_never_a_majority() -> None:
    strange = dict.fromkeys(PEERS[1:4], packed([math.nan] * 16))
    comparison = compared(telling(1.0) | strange, OWN, 4, BOUND)
    assert comparison is not None
    assert comparison.majority == frozenset()
    assert compared(strange | {OWN: packed([math.nan] * 16)}, OWN, 4, BOUND) is None
    assert compared(telling(1.0, 1.0) | dict.fromkeys(PEERS[2:4], packed([math.nan] * 16)), OWN, 4, BOUND) is not None


def test_parameters_that_are_about_the_same_are_not_far_off_for_rounding() -> None:
    """Their sums vanish by chance, in one step or another."""
    generator = torch.Generator().manual_seed(0)
    values = [1 + 0.01 * torch.randn(768, generator=generator) for _ in range(24)]
    rounded = [[value * (1 + 1e-5 * torch.randn(768, generator=generator)) for value in values] for _ in range(3)]
    for step in range(400):
        sketches = [sketch_of(tensors, step) for tensors in (values, *rounded)]
        told = {peer_id: sketch.sums for peer_id, sketch in zip(PEERS, sketches, strict=False)}
        comparison = compared(told, OWN, 4, BOUND, sketches[0].size)
        assert comparison is not None
        assert len(comparison.majority) == 4, step


def test_whose_own_parameters_are_gone_sees_those_of_the_others() -> None:
    for own, size in ((0.0, 0.0), (1e20, 4e20), (1e-20, 4e-20)):
        comparison = compared(telling(own, 1.0, 1.0 + BOUND / 2, 1.0), OWN, 4, BOUND, size)
        assert comparison is not None
        assert comparison.majority == {*PEERS[1:4]}


def test_parameters_that_are_all_zero() -> None:
    comparison = compared(telling(0.0, 0.0, 1.0), OWN, 3, BOUND)
    assert comparison is not None
    assert comparison.majority == {PEERS[0], PEERS[1]}
    assert comparison.apart[PEERS[2]] == math.inf


@given(st.integers(0, 4), st.data())
def test_a_minority_that_tells_what_it_likes_pushes_nobody_out(num_liars: int, data: st.DataObject) -> None:
    """Nor does it have the majority take one of those who lie far off for one of its own."""
    num_honest = num_liars + 1
    honest = telling(*[1.0 + data.draw(st.floats(0, BOUND / 4)) for _ in range(num_honest)])
    lies = {peer_id: data.draw(st.binary(max_size=MAX_SKETCH_BYTES)) for peer_id in PEERS[5 : 5 + num_liars]}
    comparison = compared({**lies, **honest}, OWN, num_honest + num_liars, BOUND)
    if comparison is None:
        assert num_honest == 1
    else:
        assert honest.keys() <= comparison.majority
        assert all(comparison.apart[peer_id] <= BOUND for peer_id in comparison.majority)
