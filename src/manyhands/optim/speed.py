"""Measures a peer's speed, and advises users whose settings do not suit the machine or the swarm. Pure."""

from __future__ import annotations

import math

SMOOTHING = 0.2
"""Weight of the newest batch in the average: about the last ten batches determine it."""
SHORT_STEPS_UNTIL_ADVICE = 3
"""Number of global steps in a row, each with less computing than averaging, after which there is advice."""
WAITING_STEPS = 10
"""Number of global steps over which the time in ``step()`` is compared with all time."""
WAITING_SHARE = 0.1
"""The share of the time in ``step()`` above which there is advice."""


class SpeedMeter:
    """Exponential moving average of seconds per sample, without the time spent in rounds.

    The bias of its first values is corrected as in Adam (Kingma and Ba, arXiv:1412.6980).

    Attributes:
        batch_s: seconds that the last batch took; 0 until it is known.
        samples_per_second: the speed; 0 until it is known.
        computed_s: seconds of all batches.
        waited_s: seconds between batches, since the first one.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._ended: float | None = None
        self._seconds_per_sample = self._weight = 0.0
        self.batch_s = self.samples_per_second = 0.0
        self.computed_s = self.waited_s = 0.0

    def count(self, samples: int, now: float) -> None:
        """Count samples that were computed since the last :meth:`resume`; ignored before its first call."""
        if self._since is not None:
            self.batch_s = now - self._since
            self.computed_s += self.batch_s
            self._ended = now
            seconds = self.batch_s / samples
            self._seconds_per_sample += SMOOTHING * (seconds - self._seconds_per_sample)
            self._weight += SMOOTHING * (1 - self._weight)
            if self._seconds_per_sample > 0:
                self.samples_per_second = self._weight / self._seconds_per_sample

    def resume(self, now: float) -> None:
        """Start the clock: this peer computes from now on."""
        self._since = now
        if self._ended is not None:
            self.waited_s += now - self._ended
            self._ended = None


class Advice:
    """Gives each advice once: to average less often, to delay steps, and to compute smaller batches."""

    def __init__(self, target_batch_size: int) -> None:
        self._target_batch_size = target_batch_size
        self._num_short = 0  # global steps in a row with less computing than averaging
        self._is_batch_told = self._is_waiting_told = False
        self._num_steps = 0  # global steps since the times below
        self._computed_s = self._waited_s = 0.0

    def after_batch(self, samples: int, target_batch_size: int) -> str:
        """The advice after a batch; usually empty."""
        if samples <= target_batch_size or self._is_batch_told:
            return ""
        self._is_batch_told = True
        return (
            f"a batch of {samples} samples is larger than target_batch_size={target_batch_size}: global steps have "
            f"more samples than that. Compute at most {target_batch_size} in one step here, or begin the run with a "
            "larger target"
        )

    def after_step(self, samples_per_second: float, averaging_s: float) -> str:
        """The advice after a global step; usually empty.

        Args:
            samples_per_second: speed of all peers together.
            averaging_s: seconds that the round took.
        """
        computing_s = self._target_batch_size / samples_per_second if samples_per_second > 0 else math.inf
        if self._num_short == SHORT_STEPS_UNTIL_ADVICE:
            return ""
        self._num_short = self._num_short + 1 if computing_s < averaging_s else 0
        if self._num_short < SHORT_STEPS_UNTIL_ADVICE:
            return ""
        target = working_target(computing_s, averaging_s, self._target_batch_size)
        return (
            f"The peers compute for {computing_s:.3g} s and then average for {averaging_s:.3g} s: the run waits more "
            f"than it trains. With target_batch_size={target} instead of {self._target_batch_size}, on all peers, it "
            "would compute for at least as long as it averages"
        )

    def of_waiting(self, computed_s: float, waited_s: float) -> str:
        """The advice for a peer that waits for its steps, after a global step; usually empty.

        Args:
            computed_s, waited_s: see :class:`SpeedMeter`.
        """
        self._num_steps += 1
        if self._num_steps < WAITING_STEPS or self._is_waiting_told:
            return ""
        computed_s, self._computed_s = computed_s - self._computed_s, computed_s
        waited_s, self._waited_s = waited_s - self._waited_s, waited_s
        self._num_steps = 0
        if waited_s <= WAITING_SHARE * (computed_s + waited_s):
            return ""
        self._is_waiting_told = True
        return (
            f"This peer has waited for {waited_s / (computed_s + waited_s):.0%} of its time in the last "
            f"{WAITING_STEPS} global steps. "
            'With delay="gradients" (manyhands train --delay gradients) it computes the next batches meanwhile, '
            "on parameters that are one step old, which costs the more the higher the learning rate is"
        )


def describe_late_states(num_loads: int, download_s: float, computing_s: float, target_batch_size: int) -> str:
    """The advice for a peer that cannot keep up with the run, as its downloads take longer than global steps.

    Args:
        num_loads: number of downloaded states in a row that were out of date on arrival.
        download_s: seconds that the last download took.
        computing_s: seconds for which the run computes for one global step; 0 if unknown.
    """
    if 0 < computing_s < download_s:
        target = working_target(computing_s, download_s, target_batch_size)
        larger = f"target_batch_size={target} instead of {target_batch_size}"
    else:
        larger = f"a target_batch_size above {target_batch_size}"
    return (
        f"{num_loads} downloaded states in a row were out of date on arrival: this peer cannot keep up with the run. "
        f"The last download took {download_s:.3g} s. Use a faster link, or {larger} on all peers"
    )


def working_target(computing_s: float, longer_s: float, target_batch_size: int) -> int:
    """The target at which computing takes ``longer_s`` seconds instead of ``computing_s``; rounded up to two digits."""
    needed = target_batch_size * longer_s / max(computing_s, 1e-3)
    digits = int(10 ** max(math.floor(math.log10(needed)) - 1, 0))
    return math.ceil(needed / digits) * digits
