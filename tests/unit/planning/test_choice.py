"""Which kind of steps the plan chooses, and what it says to write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

import manyhands
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.matchmaking.admission import chosen_codec
from manyhands.planning.choice import Choice, plan_of
from manyhands.planning.model import Run
from tests.unit.planning.test_model import CONSTANTS, RUN, runs


def choice(**changes: Any) -> Choice:
    return plan_of(replace(RUN, **changes), CONSTANTS).choice


def written(arguments: tuple[str, ...]) -> dict[str, Any]:
    """What the lines are in Python."""
    names = {"manyhands": manyhands, "AveragingConfig": AveragingConfig}
    return dict(eval(f"dict({', '.join(arguments)})", names))


def test_synchronous_steps_are_the_first_choice() -> None:
    chosen = choice(target_batch_size=880)
    assert (chosen.steps, chosen.codec) == ("synchronous", "int8")
    assert written(chosen.arguments) == {"target_batch_size": 880}
    assert "average for 10% of the time" in chosen.why


def test_fewer_bits_come_before_delay() -> None:
    chosen = choice(target_batch_size=800)
    assert (chosen.steps, chosen.codec) == ("synchronous", "int4")
    assert written(chosen.arguments)["averaging"] == AveragingConfig(codec="int4")


def test_delayed_steps_where_they_hide_the_round() -> None:
    chosen = choice()
    assert (chosen.steps, chosen.codec) == ("delayed", "int8")
    assert written(chosen.arguments) == {"target_batch_size": 320, "delay": "gradients"}
    assert "only from target_batch_size=880 on" in chosen.why


def test_local_steps_with_a_larger_target_where_nothing_else_helps() -> None:
    chosen = choice(target_batch_size=16)
    assert (chosen.steps, chosen.codec, chosen.target_batch_size) == ("local", "int8", 880)
    assert written(chosen.arguments) == {"target_batch_size": 880, "local_steps": manyhands.LocalSteps()}
    assert "(4 x its batch size)" in chosen.why


def test_a_fast_and_short_line_needs_no_codec() -> None:
    chosen = choice(mbit=10_000, rtt_ms=1, target_batch_size=880)
    assert (chosen.steps, chosen.codec) == ("synchronous", "none")
    assert written(chosen.arguments) == {"target_batch_size": 880}


def test_local_steps_take_int8_on_a_fast_line_too() -> None:
    chosen = choice(mbit=1000, rtt_ms=1, target_batch_size=8)
    assert (chosen.steps, chosen.codec) == ("local", "int8")
    assert written(chosen.arguments)["averaging"] == AveragingConfig(codec="int8")


def test_a_round_that_takes_long_gets_the_time() -> None:
    chosen = choice(params=1_000_000_000, target_batch_size=100_000)
    timeout_s = written(chosen.arguments)["averaging"].averaging_timeout_s
    assert timeout_s >= 2 * 240


def test_the_codec_of_auto_is_the_one_that_the_engine_takes() -> None:
    for mbit, rtt_ms in ((100, 1), (100, 50), (1000, 1), (1000, 50)):
        codec = chosen_codec("auto", [round(mbit * 1e6 / 8)], [rtt_ms / 1e3])
        assert choice(mbit=mbit, rtt_ms=rtt_ms, target_batch_size=10**6).codec == codec.name


@given(runs)
def test_each_run_gets_lines_that_the_optimizer_takes(run: Run) -> None:
    plan = plan_of(run, CONSTANTS)
    chosen = next(one for one in plan.steps if (one.steps, one.codec) == (plan.choice.steps, plan.choice.codec))
    assert chosen.averaging_share <= 0.1 + 1e-9
    assert written(plan.choice.arguments)["target_batch_size"] == chosen.target_batch_size


@pytest.mark.parametrize("target", [880, 320, 16])
def test_a_choice_says_why_in_a_few_sentences(target: int) -> None:
    why = choice(target_batch_size=target).why
    assert why.endswith(".")
    assert 1 <= why.count(". ") + 1 <= 4
