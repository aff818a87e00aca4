"""How far each peer is from what the majority holds, by what peers have published."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.sketch import MAX_SKETCH_BYTES, packed
from manyhands.base.identity import PeerId
from manyhands.optim.run.drift import BOUND, HALF_BOUND, UNKNOWN_BOUND, bound_of, distances, sketch_of

PEERS = [PeerId(f"peer{number}") for number in range(9)]


def majority_of(sketches: dict[PeerId, bytes], num_peers: int, own_size: float = 0.0) -> set[PeerId]:
    apart = distances(sketches, num_peers, BOUND, own_size)
    return {peer_id for peer_id, distance in apart.items() if distance <= BOUND}


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


def test_a_peer_that_is_far_off_is_not_of_the_majority() -> None:
    told = telling(1.0, 1.0, 1.5, 1.0 + BOUND / 2)
    assert majority_of(told, 4) == {PEERS[0], PEERS[1], PEERS[3]}
    assert distances(told, 4, BOUND, 0.0)[PEERS[2]] == pytest.approx(0.5, rel=0.01)


def test_more_than_half_of_all_known_peers_must_have_published_the_same() -> None:
    """So two that lie make nobody load what they want, before the others have published."""
    assert distances(telling(1.0, 1.5), 2, BOUND, 0.0) == {}
    assert distances(telling(1.0, 2.0, 2.0), 4, BOUND, 0.0) == {}
    assert distances(telling(2.0, 2.0), 4, BOUND, 0.0) == {}
    assert majority_of(telling(1.0, 2.0, 2.0), 3) == {PEERS[1], PEERS[2]}


@pytest.mark.parametrize("strange", [b"", b"abc", packed([1.0])])
def test_a_peer_whose_sketch_makes_no_sense_has_published_nothing(strange: bytes) -> None:
    told = telling(1.0, 1.0, 1.0)
    assert distances(told | {PEERS[3]: strange}, 4, BOUND, 0.0) == distances(told, 4, BOUND, 0.0)


@pytest.mark.parametrize("number", [0, 3], ids=["own", "another's"])
@pytest.mark.parametrize("strange", [packed([math.nan] * 16), packed([1e300] * 16), packed([1.0] * 15 + [math.inf])])
@pytest.mark.parametrize("own_size", [4.0, math.nan, math.inf])
def test_sketches_that_are_not_finite_are_infinitely_far_off(strange: bytes, number: int, own_size: float) -> None:
    told = telling(1.0, 1.0, 1.0, 1.0) | {PEERS[number]: strange}
    assert distances(told, 4, BOUND, own_size)[PEERS[number]] == math.inf
    assert majority_of(told, 4, own_size) == {*PEERS[:4]} - {PEERS[number]}


def test_sketches_that_are_not_finite_are_never_the_majority() -> None:
    strange = dict.fromkeys(PEERS[1:4], packed([math.nan] * 16))
    assert distances(telling(1.0) | strange, 4, BOUND, 0.0) == {}
    assert distances(strange, 4, BOUND, 0.0) == {}


@pytest.mark.long
def test_parameters_that_are_about_the_same_are_not_far_off_for_rounding() -> None:
    """Their sums vanish by chance, in one step or another."""
    generator = torch.Generator().manual_seed(0)
    values = [1 + 0.01 * torch.randn(768, generator=generator) for _ in range(24)]
    rounded = [[value * (1 + 1e-5 * torch.randn(768, generator=generator)) for value in values] for _ in range(3)]
    for step in range(400):
        sketches = [sketch_of(tensors, step) for tensors in (values, *rounded)]
        told = {peer_id: sketch.sums for peer_id, sketch in zip(PEERS, sketches, strict=False)}
        assert len(majority_of(told, 4, sketches[0].size)) == 4, step


def test_a_peer_whose_own_parameters_are_gone_sees_those_of_the_others() -> None:
    for own, size in ((0.0, 0.0), (1e20, 4e20), (1e-20, 4e-20)):
        assert majority_of(telling(own, 1.0, 1.0 + BOUND / 2, 1.0), 4, size) == {*PEERS[1:4]}


def test_peers_whose_parameters_are_all_zero_may_be_the_majority() -> None:
    assert majority_of(telling(0.0, 0.0, 1.0), 3) == {PEERS[0], PEERS[1]}


@given(st.integers(0, 4), st.data())
def test_a_minority_that_publishes_what_it_likes_pushes_nobody_out(num_liars: int, data: st.DataObject) -> None:
    num_honest = num_liars + 1
    honest = telling(*[1.0 + data.draw(st.floats(0, BOUND / 4)) for _ in range(num_honest)])
    lies = {peer_id: data.draw(st.binary(max_size=MAX_SKETCH_BYTES)) for peer_id in PEERS[5 : 5 + num_liars]}
    assert honest.keys() <= majority_of({**lies, **honest}, num_honest + num_liars)
