"""The formulas of the plan, and what must hold for any run."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.codecs.plan import Gathered, codec_named, plan_of
from manyhands.averaging.codecs.sparse import Sparse
from manyhands.averaging.grid.seats import layout_for
from manyhands.base.errors import ConfigError
from manyhands.planning.measured import PATH, Constants, Measured, measured_constants
from manyhands.planning.model import (
    CODECS_OF,
    LITTLE,
    SPARSE,
    Run,
    all_steps,
    averaging_s_of,
    bytes_of_step,
    predict,
    rounded_up,
)

CONSTANTS = Constants(
    bits_per_value={"none": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4, "sparse": 0.25},
    round_ns_per_value={"none": 10, "fp16": 8, "bf16": 8, "int8": 5, "int4": 15, "sparse": 12},
    contribution_ns_per_value=2,
    update_ns_per_value=20,
    line_share=0.5,
    round_trips=4,
    fixed_s=0.25,
)
RUN = Run(params=10_000_000, peers=4, mbit=100, samples_per_s=8, target_batch_size=320, rtt_ms=50)
KINDS = [(steps, codec) for steps, codecs in CODECS_OF.items() for codec in codecs]

runs = st.builds(
    Run,
    params=st.integers(1, 10**12),
    peers=st.integers(2, 100_000),
    mbit=st.floats(0.01, 1e6),
    samples_per_s=st.floats(1e-3, 1e6),
    target_batch_size=st.integers(1, 10**9),
    rtt_ms=st.floats(0, 2000),
)
kinds = st.sampled_from(KINDS)


def test_a_peer_sends_two_vectors_but_its_own_parts() -> None:
    assert bytes_of_step(RUN, CONSTANTS, "int8") == pytest.approx(1.5 * 10_000_000)
    assert bytes_of_step(replace(RUN, peers=2), CONSTANTS, "none") == pytest.approx(1.0 * 40_000_000)


def test_an_owner_of_sparse_values_passes_all_contributions_on() -> None:
    assert bytes_of_step(RUN, CONSTANTS, SPARSE) == pytest.approx(3 * 1.25 * 10_000_000 * 0.25 / 8)


def test_bytes_of_the_codecs_are_those_of_a_round() -> None:
    """As the members of a round compute them, for spans of equal size."""
    numel, constants = 4096 * 4 * 216, measured_constants()
    run = replace(RUN, params=numel)
    span = numel // 4
    for name in CODECS_OF["local"]:
        codec = codec_named(Sparse().setting) if name == SPARSE else codec_named(name)
        plan = plan_of([(1, numel)], codec)
        mean_bytes = (
            Gathered(plan, [1.0] * 4, [1.0] * 4).num_bytes(0, span) if name == SPARSE else plan.num_bytes(0, span)
        )
        sent = 3 * plan.num_bytes(0, span) + 3 * mean_bytes
        assert bytes_of_step(run, constants, name) == pytest.approx(sent, rel=1e-3)


def test_a_grid_has_a_round_for_each_axis_and_parameters_in_every_eighth_step() -> None:
    run = replace(RUN, peers=400)
    sides = layout_for(400, 256).sides
    assert run.group_sizes == sides == (20, 20)
    vectors = 2 * 2 * 19 / 20
    assert bytes_of_step(run, CONSTANTS, "int8") == pytest.approx(vectors * (1 + 4 / 8) * 10_000_000)
    assert bytes_of_step(run, CONSTANTS, SPARSE) == pytest.approx(vectors * (4 + 4 / 8) * 10_000_000)
    waits_s = 2 * (0.25 + 4 * 0.05)
    line_s = 8 * bytes_of_step(run, CONSTANTS, "int8") / 50e6
    assert averaging_s_of(run, CONSTANTS, "int8") == pytest.approx(waits_s + line_s + 0.2)


def test_averaging_takes_the_line_or_the_processor_whichever_is_slower() -> None:
    assert averaging_s_of(RUN, CONSTANTS, "int8") == pytest.approx(0.25 + 0.2 + 2.4 + 0.2)
    assert averaging_s_of(replace(RUN, mbit=100_000), CONSTANTS, "int8") == pytest.approx(0.25 + 0.2 + 0.05 + 0.2)
    by_processor_s = 10_000_000 * (12 + 4 * 2) * 1e-9
    fast = replace(RUN, mbit=100_000)
    assert averaging_s_of(fast, CONSTANTS, SPARSE) == pytest.approx(0.25 + 0.2 + by_processor_s + 0.2)


def test_a_synchronous_step_computes_then_averages() -> None:
    step = predict(RUN, CONSTANTS, "synchronous", "int8")
    assert step.computing_s == pytest.approx(10)
    assert step.step_s == pytest.approx(13.05)
    assert step.averaging_share == pytest.approx(3.05 / 13.05)
    assert step.samples == step.target_batch_size == 320
    assert step.bytes_per_day == pytest.approx(15e6 * 86_400 / 13.05)
    assert step.target_for_little == 880  # 32 samples a second, for nine times 3.05 s: 878.4


def test_a_delayed_step_takes_the_longer_of_both_and_has_more_samples_then() -> None:
    step = predict(RUN, CONSTANTS, "delayed", "int8")
    assert (step.step_s, step.averaging_share, step.samples) == (pytest.approx(10), pytest.approx(0), 320)
    short = predict(replace(RUN, target_batch_size=32), CONSTANTS, "delayed", "int8")
    assert short.step_s == pytest.approx(3.05)
    assert short.samples == round(3.05 * 32)
    assert short.averaging_share == pytest.approx(1 - 1 / 3.05)


def test_local_steps_hide_what_their_overlap_computes() -> None:
    assert predict(RUN, CONSTANTS, "local", "int8").step_s == pytest.approx(13.05)
    assert predict(RUN, CONSTANTS, "local", "int8", overlap_s=1).step_s == pytest.approx(12.05)
    assert predict(RUN, CONSTANTS, "local", "int8", overlap_s=100).step_s == pytest.approx(10)
    short = predict(replace(RUN, target_batch_size=32), CONSTANTS, "local", "int8", overlap_s=100)
    assert short.step_s == pytest.approx(1 + 3.05 - 0.5), "at most half of the computing"


def test_local_steps_are_shown_at_a_target_with_little_averaging() -> None:
    by_kind = {(step.steps, step.codec): step for step in all_steps(RUN, CONSTANTS)}
    assert [*by_kind] == KINDS
    assert by_kind["local", "int8"].target_batch_size == 880
    assert by_kind["synchronous", "int8"].target_batch_size == 320
    large = replace(RUN, target_batch_size=10_000)
    assert {step.target_batch_size for step in all_steps(large, CONSTANTS)} == {10_000}


@given(runs, kinds, st.sampled_from(["mbit", "params", "rtt_ms"]), st.floats(1, 1000))
def test_a_faster_line_or_a_smaller_model_never_makes_steps_slower(
    run: Run, kind: tuple[str, str], name: str, factor: float
) -> None:
    larger = replace(run, **{name: type(getattr(run, name))(getattr(run, name) * factor)})
    first, second = (run, larger) if name == "mbit" else (larger, run)
    slow, fast = (predict(one, CONSTANTS, *kind) for one in (first, second))
    assert fast.step_s <= slow.step_s * (1 + 1e-9)
    assert fast.averaging_share <= slow.averaging_share + 1e-9


@given(runs, kinds)
def test_a_larger_target_averages_less_and_sends_less_in_a_day(run: Run, kind: tuple[str, str]) -> None:
    few = predict(run, CONSTANTS, *kind)
    many = predict(replace(run, target_batch_size=2 * run.target_batch_size), CONSTANTS, *kind)
    assert many.averaging_share <= few.averaging_share + 1e-9
    assert many.bytes_per_day <= few.bytes_per_day * (1 + 1e-9)
    assert many.bytes_per_step == few.bytes_per_step


@given(runs, kinds, st.floats(0, 1000))
def test_the_target_for_little_averaging_is_as_small_as_it_can_be(
    run: Run, kind: tuple[str, str], overlap_s: float
) -> None:
    steps, codec = kind
    overlap_s = overlap_s if steps == "local" else 0.0

    def share(target: int) -> float:
        one = predict(run, CONSTANTS, steps, codec, target_batch_size=target, overlap_s=overlap_s)
        return one.averaging_share

    target = predict(run, CONSTANTS, steps, codec, overlap_s=overlap_s).target_for_little
    assert share(target) <= LITTLE + 1e-9
    if target >= 100:  # two digits
        assert share(int(target * 0.89)) > LITTLE


@given(runs)
def test_delayed_steps_are_never_slower_than_synchronous_ones(run: Run) -> None:
    for codec in CODECS_OF["delayed"]:
        delayed, synchronous = (predict(run, CONSTANTS, steps, codec) for steps in ("delayed", "synchronous"))
        assert delayed.step_s <= synchronous.step_s
        assert delayed.samples >= run.target_batch_size - 1


@pytest.mark.parametrize(
    ("number", "rounded"), [(0.0, 1), (0.3, 1), (9.1, 10), (99.5, 100), (100, 100), (101, 110), (878.4, 880)]
)
def test_targets_are_rounded_up_to_two_digits(number: float, rounded: int) -> None:
    assert rounded_up(number) == rounded


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("params", 0, "params=0 must be at least 1"),
        ("peers", 1, "peers=1 must be at least 2"),
        ("mbit", 0.0, "mbit=0.0 must be a finite number above 0"),
        ("mbit", float("nan"), "mbit=nan must be a finite number above 0"),
        ("mbit", 1e-300, "mbit=1e-300 must be from 1e-15 to 1e+15"),
        ("samples_per_s", -1.0, "samples_per_s=-1.0 must be a finite number above 0"),
        ("target_batch_size", 0, "target_batch_size=0 must be at least 1"),
        ("rtt_ms", -1.0, "rtt_ms=-1.0 must be a finite number of at least 0"),
        ("params", 10**30, "params=1e+30 must be from 1e-15 to 1e+15"),
    ],
)
def test_numbers_that_cannot_be_are_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(RUN, **{name: value})
    assert message in str(refused.value)


def test_constants_are_there_for_all_codecs_with_their_sources() -> None:
    constants = measured_constants()
    assert set(constants.bits_per_value) == set(constants.round_ns_per_value) == set(CODECS_OF["local"])
    assert 0.5 < constants.line_share <= 1
    for measured in msgspec.json.decode(PATH.read_bytes(), type=list[Measured]):
        assert (Path(__file__).parents[3] / measured.script).exists()
        assert measured.value > 0
        assert measured.machine
        datetime.date.fromisoformat(measured.date)
