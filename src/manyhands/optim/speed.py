"""How fast a peer computes. Pure: the caller says what time it is."""

from __future__ import annotations

SMOOTHING = 0.2


class SpeedMeter:
    """Exponential moving average of seconds per sample, without the time spent in rounds.

    The average is corrected for its start, as in Adam (Kingma and Ba, arXiv:1412.6980): the first value counts whole.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._seconds_per_sample = 0.0
        self._weight = 0.0

    @property
    def samples_per_second(self) -> float:
        """0 until the first batch."""
        return self._weight / self._seconds_per_sample if self._seconds_per_sample > 0 else 0.0

    def count(self, samples: int, now: float) -> None:
        """``samples`` were computed since the last call of this or of :meth:`resume`."""
        seconds = (now - self._since) / samples
        self._seconds_per_sample += SMOOTHING * (seconds - self._seconds_per_sample)
        self._weight += SMOOTHING * (1 - self._weight)
        self._since = now

    def resume(self, now: float) -> None:
        """Computing begins again; what passed since the last count was spent elsewhere."""
        self._since = now
