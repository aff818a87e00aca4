"""How fast the streams of this peer on long links should send together, by what the other ends acknowledge. Pure.

Several streams that each fill one line overflow its queue, and get unfair shares of it. Paced by the system at about
what the line carries, they do not. What that is shows in what was acknowledged in the best part of a stretch of time:
no line acknowledges more than it carries, whoever is slow at the other end.

All members of a round get on together, so none of them could ever show that its line carries more if each sent what it
had before: a pace is a little above that. It costs next to nothing where the line does not carry it, and one that is
too low costs as much as it is too low. So a pace rises soon, and falls late:

* The first stretch counts if the line held the streams up for most of it. Who is on a fast line among slow ones would
  take what these let it send for its line, and be paced to that for good.
* A stretch that kept its pace up, without losses, has shown a faster line, and the next pace is faster by more.
* One that was slower says nothing: streams also wait for members that are late.
* Losses, more than happen by chance, end what is above the line for a while; in two stretches after each other, they
  lower it to what got through. If as much is lost after that, it does happen by chance, and lowers nothing for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from manyhands.transport.api import Delivery

MIN_STRETCH_S = 3.0
"""A shorter one shows no rate: connections need a few round trips to get going."""

MIN_BACKLOGGED = 0.5
"""Of the first stretch: the line, and nobody else, held the streams up for so long."""

MAX_WINDOW_S = 2.0
"""The best part of a stretch is at most so long, or its half. Acknowledgements come in bursts: in less than that there
may be many more than the line carries."""

KEPT_UP = 0.98
"""Of the pace: what the best part of a stretch reaches if the pace is what holds it back."""

STEP = 0.05
MAX_STEP = 0.4
"""A pace is above what the line has shown by so much, usually and at most."""
HOLD = 2
"""Stretches after one with losses in which a pace is not above the line."""

MIN_LOSS = 0.02
"""A smaller share of bytes that are sent again happens anywhere."""

NUM_LOSSY = 2
"""Stretches with losses, one after the other, that lower the pace."""

HELPED = 0.6
"""A pace that was lowered helped if the share of losses fell by the rest, of what it should have fallen by."""

CHANCE = 1.5
"""Losses by chance are up to so many times what was seen before,"""
CHANCE_STRETCHES = 64
"""and are expected for so many stretches."""

FASTEST_FALL = 0.7
MAX_PACE = 1e12
"""Bytes per second."""


class Stretch(NamedTuple):
    """What all streams on long links did for some seconds.

    Attributes:
        best: bytes per second that got through in the best part of it.
        loss: share of the bytes sent that had to be sent again.
        backlogged: share of the time in which nearly all of them had something to send, and room for it.
    """

    best: float
    loss: float
    backlogged: float = 1.0


class Stretches:
    """Adds up what streams do, and cuts it into stretches."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, Delivery]] = []

    def begin(self) -> None:
        """Forget what was before: nothing was sent, or at another pace."""
        self._samples.clear()

    def add(self, now: float, total: Delivery) -> None:
        """What all streams together have done up to now (seconds of one clock), since any time."""
        self._samples.append((now, total))

    @property
    def seconds(self) -> float:
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    def stretch(self) -> Stretch | None:
        """All since it began; None if that says nothing."""
        if self.seconds < MIN_STRETCH_S:
            return None
        first, last = self._samples[0][1], self._samples[-1][1]
        if (num_sent := last.sent - first.sent) <= 0:
            return None
        window_s = min(MAX_WINDOW_S, self.seconds / 2)
        best = _best_rate([(at, total.delivered) for at, total in self._samples], window_s)
        backlogged = (last.busy_s - first.busy_s) / self.seconds
        return Stretch(best, (last.resent - first.resent) / num_sent, backlogged)


def _best_rate(samples: Sequence[tuple[float, int]], window_s: float) -> float:
    """The highest rate over any window of the least length, between two samples, that is not shorter."""
    best, first = 0.0, 0
    for number, (now, delivered) in enumerate(samples):
        while first + 1 < number and now - samples[first + 1][0] >= window_s:
            first += 1
        seconds = now - samples[first][0]
        if seconds >= window_s:
            best = max(best, (delivered - samples[first][1]) / seconds)
    return best


class Pace:
    """The pace of one stretch after the other.

    Attributes:
        line: what the line has shown that it carries, in bytes per second; None before the first stretch.
    """

    def __init__(self) -> None:
        self.line: float | None = None
        self._step = STEP
        self._hold = 0  # stretches that must keep up before the pace is above the line again
        self._num_lossy = 0  # stretches in a row
        self._helped_below: float | None = None  # the pace was just lowered; if it helps, less than this is lost now
        self._chance, self._chance_left = 0.0, 0  # losses that happen by chance; stretches in which they are expected

    @property
    def bytes_per_s(self) -> float | None:
        """For all streams together; None as long as nothing is known."""
        if self.line is None:
            return None
        return min(self.line * (1 if self._hold else 1 + self._step), MAX_PACE)

    def add(self, stretch: Stretch) -> None:
        """Count one stretch; all of it was sent at this pace, or without one."""
        pace = self.bytes_per_s
        if self.line is None or pace is None:
            if stretch.backlogged >= MIN_BACKLOGGED:
                self.line = stretch.best or None
            return
        is_lossy = self._is_lossy(stretch.loss)
        keeps_up = not is_lossy and stretch.best >= KEPT_UP * pace * (1 - stretch.loss)
        if is_lossy:
            self._hold = HOLD
        elif keeps_up:
            self._step, self._hold = min(2 * self._step, MAX_STEP), max(0, self._hold - 1)
        if self._hold or not keeps_up:
            self._step = STEP
        self._num_lossy = self._num_lossy + 1 if is_lossy else 0
        if self._num_lossy == NUM_LOSSY:
            self.line = self._lowered(pace, stretch)
        else:
            self.line = min(max(self.line, stretch.best), MAX_PACE)

    def _is_lossy(self, loss: float) -> bool:
        """Whether more is lost than by chance: a slower pace may help."""
        helped_below, self._helped_below = self._helped_below, None
        self._chance_left -= 1
        if self._chance_left <= 0:
            self._chance = 0.0
        if helped_below is not None and loss > max(helped_below, MIN_LOSS):
            self._chance, self._chance_left = loss, CHANCE_STRETCHES
        return loss > CHANCE * self._chance + MIN_LOSS

    def _lowered(self, pace: float, stretch: Stretch) -> float:
        """What the line carries now; acknowledgements come in bursts, so the best part alone may be too good."""
        carried = max(min(stretch.best, pace * (1 - stretch.loss)), FASTEST_FALL * pace)
        at_best = max(0.0, 1 - (1 - stretch.loss) * pace / carried)
        self._helped_below = HELPED * stretch.loss + (1 - HELPED) * at_best
        self._num_lossy = 0
        return carried
