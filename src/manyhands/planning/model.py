"""Predicts how long the global steps of a run take, and how many bytes a peer sends. Pure.

The model has n equal peers, with d parameters, which are one float32 vector of d values in a round. Each peer computes
v samples a second; its line carries r bits a second in each direction, and takes the round-trip time t to the others.

*Computing.* A step with a target of B samples needs ``C = B / (n v)`` seconds of computing.

*Bytes.* In a butterfly all-reduce each of n members sends its values of the spans that the others own, (n - 1) / n of
the vector, and the mean of its own span, 1 / n of the vector, to n - 1 members. Together that is ``2 (n - 1) / n``
vectors, and it receives as much. A value has the bits of the codec. ``sparse`` passes all n contributions on in place
of a mean, so a peer sends ``(n - 1) / n + (n - 1) = (n - 1) (1 + 1 / n)`` of its encoded vectors.

*Grid.* More peers than ``AveragingConfig.max_group_size`` make a step in several rounds, one along each axis of a grid
(:func:`manyhands.averaging.grid.seats.layout_for`); the formulas above hold for each round, with the length of the axis
as n. Every eighth step the parameters travel as well, as exact float32; the plan has an eighth of that in each step.
There ``sparse`` changes are sent as float32, too.

*Averaging.* With k rounds in a step, the peers wait for

    A = k (fixed_s + round_trips t) + max(8 bytes / (line_share r), d round_ns_per_value) + d update_ns_per_value

seconds: the search for the group, the streams, the vote and the commit; then the line or the processor, whichever is
slower, as a round encodes, sends and reduces at the same time; then the update. With ``sparse`` each peer also adds up
all n contributions, for ``contribution_ns_per_value`` each. :class:`.measured.Constants` has the measured numbers. One
core does all of the work.

*A step* takes ``C + max(0, A - H)`` seconds, if the peers compute for H seconds while they average:

- synchronous: H = 0.
- delayed (``delay="gradients"``): H = C. No step begins before the last one has ended, and the peers never stop
  computing. So a step takes max(C, A), and if A is larger it has more samples than its target.
- local (``LocalSteps``): H = 0, or what ``overlap_steps`` batches take, up to C / 2. A step is here the time from one
  average to the next. ``fragments=F`` sends the same bytes in F rounds, so only ``k`` becomes k F.

*Share of averaging.* The part of a step beyond the computing for its target: 1 - C / (step).

Left out: biases and norms, which travel as float32; waits for the batches that other peers have begun, which depend
on how much longer they take (``benchmarks/step_samples.py``); peers with unequal lines or speeds; rounds that fail;
progress records, newcomers and headers. ``benchmarks/plan_check.py`` compares the plan with real peers.

Sources: Ryabinin et al., Moshpit SGD, arXiv:2103.03239 (butterfly and grid); Douillard et al., Streaming DiLoCo,
arXiv:2501.18512 (share of the time that peers compute).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from manyhands.averaging.config import CODEC_NAMES, AveragingConfig
from manyhands.averaging.grid.seats import layout_for
from manyhands.base.arguments import check_number, whole
from manyhands.base.errors import ConfigError
from manyhands.optim.config import PARAMETERS_EVERY
from manyhands.planning.measured import Constants

Steps = Literal["synchronous", "delayed", "local"]
SPARSE = "sparse"
"""The codec of ``LocalSteps(sparse=Sparse())``."""
CODECS_OF: dict[Steps, tuple[str, ...]] = {
    "synchronous": CODEC_NAMES,
    "delayed": CODEC_NAMES,
    "local": (*CODEC_NAMES, SPARSE),
}
LITTLE = 0.1
"""Averaging should take less than this share of the time."""
HIDDEN = {"synchronous": 0.0, "delayed": 1.0, "local": 0.5}
"""By the kind of steps, the largest part of the computing during which peers average (local: docs/adr/0069)."""
LARGEST = 1e15
"""Larger numbers, and numbers below its inverse, count as mistyped."""
DAY_S = 86_400
BITS, MEGA, NANO = 8, 1e6, 1e-9


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run that is planned; all peers are equal.

    Attributes:
        params: number of trained parameters.
        peers: number of peers.
        mbit: megabits per second of a peer's line, in its slower direction.
        samples_per_s: samples that one peer computes in a second, without averaging.
        target_batch_size: samples of all peers in one global step.
        rtt_ms: round-trip time between two peers.
    Raises:
        ConfigError: a number cannot be used.
    """

    params: int
    peers: int
    mbit: float
    samples_per_s: float
    target_batch_size: int
    rtt_ms: float = 50.0

    def __post_init__(self) -> None:
        whole("params", self.params, least=1, example=18_000_000)
        whole("peers", self.peers, least=2, example=40)
        whole("target_batch_size", self.target_batch_size, least=1, example=4096)
        check_number("mbit", self.mbit, example=50)
        check_number("samples_per_s", self.samples_per_s, example=20)
        check_number("rtt_ms", self.rtt_ms, example=50, may_be_zero=True)
        for name in ("params", "peers", "target_batch_size", "mbit", "samples_per_s"):
            if not 1 / LARGEST <= getattr(self, name) <= LARGEST:
                raise ConfigError(f"{name}={getattr(self, name):g} must be from {1 / LARGEST:g} to {LARGEST:g}")

    @property
    def samples_per_s_of_all(self) -> float:
        return self.peers * self.samples_per_s

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """The number of members in each round of a step."""
        return layout_for(self.peers, AveragingConfig.max_group_size).sides or (self.peers,)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for one kind of steps with one codec.

    Attributes:
        steps: the kind.
        target_batch_size: samples of all peers in a step. That of the run, or of local steps ``target_for_little``
            if that is larger.
        samples: that a step really has: more than the target if a delayed step averages for longer than that takes.
        computing_s: seconds for which the peers compute the target.
        averaging_s: seconds of averaging, hidden or not.
        step_s: seconds from one step to the next.
        averaging_share: share of ``step_s`` beyond ``computing_s``.
        bytes_per_step: that a peer sends in a step. It receives as many.
        bytes_per_day: the same in 24 hours.
        target_for_little: target batch size from which ``averaging_share`` is at most ``LITTLE``.
    """

    steps: Steps
    codec: str
    target_batch_size: int
    samples: int
    computing_s: float
    averaging_s: float
    step_s: float
    averaging_share: float
    bytes_per_step: float
    bytes_per_day: float
    target_for_little: int


def all_steps(run: Run, constants: Constants) -> list[Step]:
    """Predict each kind of steps with each codec. Local steps have a target with which they average little."""
    return [_little_averaging(run, constants, steps, codec) for steps, codecs in CODECS_OF.items() for codec in codecs]


def _little_averaging(run: Run, constants: Constants, steps: Steps, codec: str) -> Step:
    step = predict(run, constants, steps, codec)
    if steps != "local" or step.target_for_little <= run.target_batch_size:
        return step
    return predict(run, constants, steps, codec, target_batch_size=step.target_for_little)


def predict(
    run: Run,
    constants: Constants,
    steps: Steps,
    codec: str,
    *,
    target_batch_size: int | None = None,
    overlap_s: float = 0.0,
) -> Step:
    """Predict one kind of steps with one codec.

    Args:
        codec: one of ``CODECS_OF[steps]``.
        target_batch_size: in place of the run's.
        overlap_s: seconds that the batches of ``LocalSteps(overlap_steps=...)`` take; for local steps only.
    """
    target = target_batch_size or run.target_batch_size
    averaging_s = averaging_s_of(run, constants, codec)
    computing_s = target / run.samples_per_s_of_all
    hidden_share = HIDDEN[steps]
    most_hidden_s = overlap_s if steps == "local" else math.inf
    step_s = computing_s + max(0.0, averaging_s - min(hidden_share * computing_s, most_hidden_s))
    num_bytes = bytes_of_step(run, constants, codec)
    return Step(
        steps=steps,
        codec=codec,
        target_batch_size=target,
        samples=round(step_s * run.samples_per_s_of_all) if steps == "delayed" else target,
        computing_s=computing_s,
        averaging_s=averaging_s,
        step_s=step_s,
        averaging_share=1 - computing_s / step_s,
        bytes_per_step=num_bytes,
        bytes_per_day=num_bytes * DAY_S / step_s,
        target_for_little=rounded_up(
            _computing_s_for_little(averaging_s, hidden_share, most_hidden_s) * run.samples_per_s_of_all
        ),
    )


def bytes_of_step(
    run: Run, constants: Constants, codec: str, *, parameters_share: float = 1 / PARAMETERS_EVERY
) -> float:
    """Bytes that a peer sends in a step.

    Args:
        parameters_share: how often the parameters travel in a step of a grid: the mean, or 1 for a step with them.
    """
    return sum(
        num_values * _vectors_sent(size, name) * constants.bits_per_value[name] / BITS
        for size in run.group_sizes
        for name, num_values in _loads(run, codec, parameters_share)
    )


def averaging_s_of(
    run: Run, constants: Constants, codec: str, *, parameters_share: float = 1 / PARAMETERS_EVERY
) -> float:
    """Seconds of averaging in a step; the arguments are those of :func:`bytes_of_step`."""
    num_rounds = len(run.group_sizes)
    num_bytes = bytes_of_step(run, constants, codec, parameters_share=parameters_share)
    line_s = num_bytes * BITS / (constants.line_share * run.mbit * MEGA)
    round_ns = sum(
        num_values * _round_ns_per_value(constants, name, size)
        for size in run.group_sizes
        for name, num_values in _loads(run, codec, parameters_share)
    )
    waits_s = num_rounds * (constants.fixed_s + constants.round_trips * run.rtt_ms / 1e3)
    return waits_s + max(line_s, round_ns * NANO) + run.params * constants.update_ns_per_value * NANO


def _loads(run: Run, codec: str, parameters_share: float) -> Iterable[tuple[str, float]]:
    """The codecs in a round, with the number of values that each one encodes."""
    if len(run.group_sizes) == 1:
        return [(codec, run.params)]
    return [("none" if codec == SPARSE else codec, run.params), ("none", parameters_share * run.params)]


def _round_ns_per_value(constants: Constants, codec: str, num_members: int) -> float:
    """CPU time of a member of a group for one value."""
    added = num_members * constants.contribution_ns_per_value if codec == SPARSE else 0.0
    return constants.round_ns_per_value[codec] + added


def _vectors_sent(num_members: int, codec: str) -> float:
    """Encoded vectors that a member of a group sends in a round."""
    if codec == SPARSE:
        return (num_members - 1) * (1 + 1 / num_members)
    return 2 * (num_members - 1) / num_members


def _computing_s_for_little(averaging_s: float, hidden_share: float, most_hidden_s: float) -> float:
    """The least C for which ``max(0, A - min(hidden_share * C, most_hidden_s))`` is the share ``LITTLE`` of a step."""
    computing_s = averaging_s / (hidden_share + LITTLE / (1 - LITTLE))
    if hidden_share * computing_s <= most_hidden_s:
        return computing_s
    return (1 / LITTLE - 1) * (averaging_s - most_hidden_s)


def rounded_up(number: float) -> int:
    """The smallest whole number of two digits, and zeros, that is not below this one."""
    unit = int(10 ** max(0, math.floor(math.log10(max(number, 1.0))) - 1))
    return max(1, math.ceil(number / unit) * unit)
