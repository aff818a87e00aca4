"""What to say to a user whose settings do not suit the machine or the swarm. Pure, but for what was said already."""

from __future__ import annotations

import math

SHORTEST_BATCH_S = 0.2
LONGEST_BATCH_S = 2.0
WARM_UP_BATCHES = 3
"""The first batches take longer than the others."""
BATCHES_IN_A_STEP = 8
"""At least so many, of all peers together: else steps have many more samples than their target."""
ENOUGH_LARGER = 1.25
"""A size that is larger by less than this is none to recommend."""
NUM_STEPS = 3
"""In a row, before anything is said about them."""


class Advice:
    """Looks at batches and steps, and says each thing once; an empty string is nothing to say."""

    def __init__(self, target_batch_size: int) -> None:
        self._target_batch_size = target_batch_size
        self._num_batches = 0
        self._outside_in_a_row = 0
        self._has_spoken_of_batches = False
        self._short_in_a_row = 0
        self._has_spoken_of_steps = False

    def after_batch(self, batch_s: float, samples: int) -> str:
        """Look at the time of one micro-batch."""
        self._num_batches += 1
        is_outside = not SHORTEST_BATCH_S <= batch_s <= LONGEST_BATCH_S
        self._outside_in_a_row = self._outside_in_a_row + 1 if is_outside and self._num_batches > WARM_UP_BATCHES else 0
        if self._outside_in_a_row < NUM_STEPS or self._has_spoken_of_batches:
            return ""
        self._has_spoken_of_batches = True
        return describe_batch(batch_s, samples, self._target_batch_size // BATCHES_IN_A_STEP)

    def after_step(self, computing_s: float, averaging_s: float) -> str:
        """Look at one global step: seconds from the last one to the round, and of averaging without the search."""
        self._short_in_a_row = self._short_in_a_row + 1 if computing_s < averaging_s else 0
        if self._short_in_a_row < NUM_STEPS or self._has_spoken_of_steps:
            return ""
        self._has_spoken_of_steps = True
        return describe_step(computing_s, averaging_s, self._target_batch_size)


def describe_batch(batch_s: float, samples: int, most: float = math.inf) -> str:
    """The hint for a micro-batch that is too short or too long; a size above ``most`` would leave a step too few."""
    is_short = batch_s < SHORTEST_BATCH_S
    if is_short:
        what, how = "shorter", "a larger batch, or several backward passes before each step(), have less overhead"
    else:
        what, how = "longer", "a smaller batch lets the others wait less for this peer"
    best = samples * math.sqrt(SHORTEST_BATCH_S * LONGEST_BATCH_S) / max(batch_s, 1e-3)
    best = min(best, most) if is_short else max(best, 1.0)
    if is_short and best < ENOUGH_LARGER * samples:  # with larger ones steps would have much more than their target
        hint = ", or a larger target_batch_size on all peers"
    else:
        hint = f"; about {round(float(f'{best:.2g}'))} samples would do" if round(best) != samples else ""
    return (
        f"A micro-batch of {samples} samples takes {batch_s:.3g} s here, {what} than the {SHORTEST_BATCH_S} to "
        f"{LONGEST_BATCH_S:.0f} s that suit a swarm: {how}{hint}"
    )


def describe_step(computing_s: float, averaging_s: float, target_batch_size: int) -> str:
    """The words for a run that averages for longer than it computes."""
    return (
        f"The peers compute for {computing_s:.3g} s and then average for {averaging_s:.3g} s: the run waits more than "
        f"it trains. With target_batch_size={working_target(computing_s, averaging_s, target_batch_size)} instead of "
        f"{target_batch_size}, on all peers, it would compute for at least as long as it averages"
    )


def describe_late_states(num_loads: int, download_s: float, computing_s: float, target_batch_size: int) -> str:
    """The words for a peer whose downloads take longer than steps.

    Args:
        computing_s: the run takes so long for the samples of a step; 0 if that is not known.
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
    """The target, rounded up to two digits, at which computing takes as long as something that takes longer now."""
    needed = target_batch_size * longer_s / max(computing_s, 1e-3)
    digits = int(10 ** max(math.floor(math.log10(needed)) - 1, 0))
    return math.ceil(needed / digits) * digits
