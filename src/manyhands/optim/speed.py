"""How fast a peer computes. Pure: the caller says what time it is."""

from __future__ import annotations

SMOOTHING = 0.2


class SpeedMeter:
    """Exponential moving average of seconds per sample, without the time spent in rounds.

    The average is corrected for its start, as in Adam (Kingma and Ba, arXiv:1412.6980): the first value counts whole.
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
        """``samples`` were computed since :meth:`resume`; before its first call nothing is known of their time."""
        if self._since is not None:
            self.batch_s = now - self._since
            seconds = self.batch_s / samples
            self._seconds_per_sample += SMOOTHING * (seconds - self._seconds_per_sample)
            self._weight += SMOOTHING * (1 - self._weight)

    def resume(self, now: float) -> None:
        """Computing begins, or goes on after something else."""
        self._since = now
