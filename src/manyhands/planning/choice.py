"""Chooses the kind of steps and the codec of a run, says why, and which arguments of the optimizer give them. Pure.

The first of these that averages for less than a tenth of the time:

1. synchronous steps, which make the update of one process with the whole batch;
2. delayed steps, which use gradients that are one step old;
3. local steps with a larger target, which lose a little loss.

Synchronous and delayed steps with the codec that ``auto`` would take, then with fewer bits. Local steps with int8, as
codecs cost them next to nothing (``benchmarks/local_steps.py``).
"""

from __future__ import annotations

import math

import msgspec

from manyhands.averaging.config import SLOW_BYTES_PER_S, AveragingConfig
from manyhands.averaging.timing import FAR_RTT_S
from manyhands.base.text import rough
from manyhands.optim.config import MANY_STEPS
from manyhands.planning.measured import Constants
from manyhands.planning.model import BITS, LITTLE, MEGA, Run, Step, all_steps, averaging_s_of, predict, rounded_up

TIME_TO_SPARE = 2
"""The time limit of a round, in multiples of the time that it should take. It is 2, as a round ends after
half of its limit if most lines are too slow."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What to write, and why.

    Attributes:
        steps, codec, target_batch_size: of the chosen step.
        why: some sentences.
        arguments: of ``manyhands.Optimizer``, one a line.
    """

    steps: str
    codec: str
    target_batch_size: int
    why: str
    arguments: tuple[str, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer: all predictions, and the choice."""

    steps: tuple[Step, ...]
    choice: Choice


def plan_of(run: Run, constants: Constants) -> Plan:
    """Predict all kinds of steps with all codecs, and choose one."""
    steps = all_steps(run, constants)
    chosen = _chosen(run, steps)
    return Plan(
        steps=tuple(steps),
        choice=Choice(
            steps=chosen.steps,
            codec=chosen.codec,
            target_batch_size=chosen.target_batch_size,
            why=_why(run, constants, steps, chosen),
            arguments=_arguments(run, constants, chosen),
        ),
    )


def _auto_of(run: Run) -> str:
    """The codec that ``auto`` takes in this run."""
    return "int8" if run.mbit * MEGA / BITS < SLOW_BYTES_PER_S or run.rtt_ms > 1e3 * FAR_RTT_S else "none"


def _chosen(run: Run, steps: list[Step]) -> Step:
    codecs = ["int8", "int4"] if _auto_of(run) == "int8" else ["none", "int8", "int4"]
    in_order = [_one(steps, kind, codec) for kind in ("synchronous", "delayed") for codec in codecs]
    return next((step for step in in_order if step.averaging_share < LITTLE), _one(steps, "local", "int8"))


def _one(steps: list[Step], kind: str, codec: str) -> Step:
    return next(step for step in steps if (step.steps, step.codec) == (kind, codec))


def _why(run: Run, constants: Constants, steps: list[Step], chosen: Step) -> str:
    synchronous = _one(steps, "synchronous", chosen.codec)
    share = f"{synchronous.averaging_share:.0%}"
    if chosen.steps == "synchronous":
        return (
            f"Synchronous steps with {chosen.codec}: they average for {share} of the time, and make the update of one "
            f"process with the whole batch{'' if chosen.codec == 'none' else ', apart from rounding'}."
        )
    instead = (
        f"synchronous ones would average for {share} of the time, and for less than a tenth only from "
        f"target_batch_size={synchronous.target_for_little} on"
    )
    if chosen.steps == "delayed":
        return (
            f"Delayed steps with {chosen.codec}: {instead}. Delayed ones average while the next batches are computed; "
            f"their gradients are one step old.{_with_more_bits(steps, chosen)}"
        )
    overlap = predict(run, constants, "local", chosen.codec, overlap_s=math.inf)
    return (
        f"Local steps with {chosen.codec}: {instead}. With local steps so large a target is no large batch, but "
        f"{rough(chosen.computing_s)} of training alone between two averages: each peer then makes target_batch_size "
        f"/ ({run.peers} x its batch size) steps of its own, at best up to {MANY_STEPS}. With target_batch_size="
        f"{max(run.target_batch_size, overlap.target_for_little)} and overlap_steps of half of the steps that this "
        "gives, they compute for as much of the time; the overlap itself costs some loss."
    )


def _with_more_bits(steps: list[Step], chosen: Step) -> str:
    if chosen.codec != "int4":
        return ""
    return f" With int8, target_batch_size={_one(steps, chosen.steps, 'int8').target_for_little} is enough."


def _arguments(run: Run, constants: Constants, chosen: Step) -> tuple[str, ...]:
    lines = [f"target_batch_size={chosen.target_batch_size}"]
    if chosen.steps == "delayed":
        lines.append('delay="gradients"')
    if chosen.steps == "local":
        lines.append("local_steps=manyhands.LocalSteps()")
    averaging = [f'codec="{chosen.codec}"'] if chosen.codec != _auto_of(run) else []
    longest_s = TIME_TO_SPARE * averaging_s_of(run, constants, chosen.codec, parameters_share=1.0)
    if longest_s > AveragingConfig.averaging_timeout_s:
        averaging.append(f"averaging_timeout_s={rounded_up(longest_s)}")
    if averaging:
        lines.append(f"averaging=AveragingConfig({', '.join(averaging)})")
    return tuple(lines)
