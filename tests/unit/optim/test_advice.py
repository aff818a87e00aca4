from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.optim.speed import Advice, describe_batch, describe_late_states, working_target


def test_short_and_long_batches_get_one_hint() -> None:
    for batch_s, word in ((0.05, "shorter"), (9.0, "longer")):
        advice = Advice(256)
        said = [advice.after_batch(batch_s, 8) for _ in range(20)]
        hints = [text for text in said if text]
        assert len(hints) == 1
        assert word in hints[0]
        assert not any(said[:5]), "the first batches take longer, and one says nothing"


@pytest.mark.parametrize("batch_s", [0.2, 0.7, 2.0])
def test_batches_that_suit_get_none(batch_s: float) -> None:
    advice = Advice(256)
    assert not any(advice.after_batch(batch_s, 8) for _ in range(20))


def test_the_hint_names_a_size_that_would_do() -> None:
    assert "about 51 samples" in describe_batch(0.1, 8)
    assert "about 1 samples" in describe_batch(60.0, 8)


def test_the_hint_names_a_round_size_of_which_several_make_a_step() -> None:
    assert "about 2400 samples" in describe_batch(0.01, 38)
    assert "about 510 samples" in describe_batch(0.0004, 32, most=512)
    for samples, most in ((32, 8), (128, 128), (512, 512), (144, 144), (120, 128)):
        only_the_target = describe_batch(0.01, samples, most)  # with larger batches steps would have much more than it
        assert only_the_target.endswith("less overhead, or a larger target_batch_size on all peers")
    assert describe_batch(60.0, 1).endswith("wait less for this peer"), "there is no smaller batch"
    advice = Advice(4096)
    said = [advice.after_batch(0.0004, 32) for _ in range(10)]
    assert "about 510 samples" in "".join(said)


def test_a_batch_now_and_then_is_no_habit() -> None:
    advice = Advice(256)
    assert not any(advice.after_batch(9.0 if number % 2 else 1.0, 8) for number in range(40))


def test_steps_shorter_than_their_averaging_are_said_once_with_a_target_that_works() -> None:
    advice = Advice(256)
    said = [advice.after_step(computing_s=2.0, averaging_s=5.0) for _ in range(9)]
    assert [bool(text) for text in said] == [False, False, True, *[False] * 6]
    assert "target_batch_size=640 instead of 256" in said[2]
    assert not any(Advice(256).after_step(computing_s=5.0, averaging_s=2.0) for _ in range(9))


@given(st.floats(0.01, 100), st.floats(0.01, 1000), st.integers(1, 10**6))
def test_at_the_named_target_computing_takes_as_long_as_averaging(
    computing_s: float, averaging_s: float, target: int
) -> None:
    named = working_target(computing_s, averaging_s, target)
    assert named * computing_s / target >= averaging_s * (1 - 1e-9)
    assert named <= max(1.11 * target * averaging_s / computing_s + 1, 1)


def test_who_comes_too_late_hears_of_a_target_that_works() -> None:
    assert "target_batch_size=480 instead of 48, on all peers" in describe_late_states(4, 30.0, 3.0, 48)
    for computing_s in (0.0, 40.0):  # not known; or it is something else that takes so long
        assert "a target_batch_size above 48, on all peers" in describe_late_states(4, 30.0, computing_s, 48)
