"""What an optimizer has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Statistics:
    """Counts since an optimizer was made.

    Attributes:
        samples_computed: went through ``step`` on this peer.
        samples_used: of these, in committed global steps.
        samples_of_all: in those steps that this peer made, of all peers together; by weight where that is not samples.
        samples_dropped: of these, thrown away: an overflow, a refused update, or the state of another branch was
            loaded.
        samples_carried: how many were left out of a step that the others made, and went on to the next one.
        rounds_committed, rounds_aborted: averaging rounds that this peer took part in.
        steps_alone: global steps made while nobody else was there.
        updates_refused: global steps that left the parameters as they were, since the update was not finite.
        states_loaded: how often the state was downloaded.
        parameters_reloaded: of these, because the majority held other parameters at the same place in the run.
        disagreement: how far apart the parameters of this peer and the majority (in a grid, or without one, of all
            peers) were before the last step, as a fraction of their size, by what they published; None if that is not
            known.
    """

    samples_computed: int = 0
    samples_used: int = 0
    samples_of_all: int = 0
    samples_dropped: int = 0
    samples_carried: int = 0
    rounds_committed: int = 0
    rounds_aborted: int = 0
    steps_alone: int = 0
    updates_refused: int = 0
    states_loaded: int = 0
    parameters_reloaded: int = 0
    disagreement: float | None = None

    def summary(self) -> str:
        """For a log line."""
        share = self.samples_used / self.samples_computed if self.samples_computed else 1.0
        counts = [
            f"{self.samples_computed} samples computed here so far",
            f"{self.samples_used} of them used ({share:.1%})",
        ]
        if self.samples_dropped:
            counts.append(f"{self.samples_dropped} dropped")
        return ", ".join(counts)
