"""Measures a peer's speed, and advises users whose settings do not suit the machine or the swarm. Pure."""

from __future__ import annotations

import math

SMOOTHING = 0.2
"""Weight of the newest batch in the speed: the last ten or so count."""
SHORTEST_BATCH_S = 0.2
LONGEST_BATCH_S = 2.0
"""Shorter batches have much overhead; for a longer one the others of a step wait."""
WARM_UP_BATCHES = 3
"""The first batches take longer than the others."""
NUM_IN_A_ROW = 3
"""Similar batches or steps in a row before advice is given."""


class SpeedMeter:
    """Exponential moving average of seconds per sample, without the time spent in rounds.

    Corrected for its start, as in Adam (Kingma and Ba, arXiv:1412.6980): the first value has full weight.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds_per_sample = 0.0
        self._weight = 0.0
        self.batch_s = 0.0
        """Seconds of the last batch; 0 until it is known."""

    @property
    def samples_per_second(self) -> float:
        """0 until it is known."""
        return self._weight / self._seconds_per_sample if self._seconds_per_sample > 0 else 0.0

    def count(self, samples: int, now: float) -> None:
        """Count ``samples`` computed since :meth:`resume`; their time is unknown before its first call."""
        if self._since is not None:
            self.batch_s = now - self._since
            seconds = self.batch_s / samples
            self._seconds_per_sample += SMOOTHING * (seconds - self._seconds_per_sample)
            self._weight += SMOOTHING * (1 - self._weight)

    def resume(self, now: float) -> None:
        """Computing begins, or goes on after something else."""
        self._since = now


class Advice:
    """Checks batches and steps, and gives each advice once; an empty string means none."""

    def __init__(self, target_batch_size: int) -> None:
        self._target_batch_size = target_batch_size
        self._num_batches = 0
        self._unsuitable_batches, self._short_steps = _Habit(), _Habit()

    def after_batch(self, batch_s: float, samples: int) -> str:
        """Check the time of one micro-batch."""
        self._num_batches += 1
        is_suitable = self._num_batches <= WARM_UP_BATCHES or SHORTEST_BATCH_S <= batch_s <= LONGEST_BATCH_S
        return describe_batch(batch_s, samples) if self._unsuitable_batches.is_new(not is_suitable) else ""

    def after_step(self, computing_s: float, averaging_s: float) -> str:
        """Check one global step: seconds from the last one to the round, and of averaging without the search."""
        if not self._short_steps.is_new(computing_s < averaging_s):
            return ""
        target = working_target(computing_s, averaging_s, self._target_batch_size)
        return (
            f"The peers compute for {computing_s:.3g} s and then average for {averaging_s:.3g} s: the run waits more "
            f"than it trains. With target_batch_size={target} instead of {self._target_batch_size}, on all peers, it "
            "would compute for at least as long as it averages"
        )


class _Habit:
    """Something to report once, when it occurred ``NUM_IN_A_ROW`` times in a row."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._is_said = False

    def is_new(self, is_so: bool) -> bool:
        self._in_a_row = self._in_a_row + 1 if is_so else 0
        is_new = self._in_a_row >= NUM_IN_A_ROW and not self._is_said
        self._is_said = self._is_said or is_new
        return is_new


def describe_batch(batch_s: float, samples: int) -> str:
    """The hint for a micro-batch that is too short or too long."""
    if batch_s < SHORTEST_BATCH_S:
        what = "shorter"
        how = (
            "a larger batch, or several backward passes before each step(), have less overhead; where a few of these "
            "reach target_batch_size, raise that on all peers"
        )
    else:
        what, how = "longer", "a smaller batch lets the others wait less for this peer"
    return (
        f"A micro-batch of {samples} samples takes {batch_s:.3g} s here, {what} than the {SHORTEST_BATCH_S} to "
        f"{LONGEST_BATCH_S:.0f} s that suit a swarm: {how}"
    )


def describe_late_states(num_loads: int, download_s: float, computing_s: float, target_batch_size: int) -> str:
    """The advice for a peer whose downloads take longer than steps.

    Args:
        computing_s: the run's time for the samples of a step; 0 if unknown.
    """
    if 0 < computing_s < download_s:
        target = working_target(computing_s, download_s, target_batch_size)
        larger = f"target_batch_size={target} instead of {target_batch_size}"
    else:
        larger = f"a target_batch_size above {target_batch_size}"
    return (
        f"{num_loads} states in a row were out of date when they were here: this peer cannot keep up with the run. The "
        f"last one took {download_s:.3g} s. A faster link would do, or {larger}, on all peers"
    )


def working_target(computing_s: float, longer_s: float, target_batch_size: int) -> int:
    """The target, rounded up to two digits, at which computing takes as long as an operation that now takes longer."""
    needed = target_batch_size * longer_s / max(computing_s, 1e-3)
    digits = int(10 ** max(math.floor(math.log10(needed)) - 1, 0))
    return math.ceil(needed / digits) * digits
