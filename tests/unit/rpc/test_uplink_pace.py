from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from manyhands.rpc.uplink import MAX_PACE, IntervalSampler, MonitorInterval, Pace
from manyhands.transport.api import Delivery
from tests.sweeps import few_of

MB = 10**6
LINE = 12 * MB


class Line:
    """A line, and the streams of one peer that send over it at its pace for one interval after the other.

    Attributes:
        bytes_per_s: what it carries.
        others: what the other ends take.
        drops: share of what is too much for it that is lost; the rest, the senders notice in time.
        chance: gives the losses that nobody has caused.
    """

    def __init__(self, seed: int, *, drops: float = 1.0) -> None:
        self.pace = Pace()
        self.bytes_per_s: float = LINE
        self.others = math.inf
        self.drops = drops
        self.chance: Callable[[], float] = lambda: 0.0
        self._rng = random.Random(seed)

    def interval(self) -> float:
        """One interval; returns what got through, in bytes per second."""
        pace = self.pace.bytes_per_s
        offered = min(1.1 * self.bytes_per_s if pace is None else pace, self.others)
        loss = min(1.0, self.drops * max(0.0, 1 - self.bytes_per_s / offered) + self.chance())
        through = min(offered * (1 - loss), self.bytes_per_s)
        noise = self._rng.uniform(0.95, 1.05) if pace is None else self._rng.uniform(0.99, 1.005)
        self.pace.add(MonitorInterval(through * noise, loss))
        return through

    def intervals(self, count: int) -> list[float]:
        return [self.interval() for _ in range(count)]


def pace_of(line: Line) -> float:
    assert line.pace.bytes_per_s is not None
    return line.pace.bytes_per_s


def test_there_is_no_pace_before_an_interval_has_shown_one() -> None:
    pace = Pace()
    assert pace.bytes_per_s is None
    pace.add(MonitorInterval(best=0.0, loss=0.0))
    assert pace.bytes_per_s is None
    assert pace.line is None
    pace.add(MonitorInterval(best=5.0 * MB, loss=0.1))
    assert pace.line == 5 * MB
    assert pace.bytes_per_s == pytest.approx(5.25 * MB)


@pytest.mark.parametrize("seed", few_of(range(5), 2))
@pytest.mark.parametrize("drops", [0.0, 0.3, 1.0])
def test_a_pace_stays_about_what_the_line_carries(drops: float, seed: int) -> None:
    line = Line(seed, drops=drops)
    line.intervals(6)
    for _ in range(300):
        assert line.interval() > 0.93 * LINE
        assert pace_of(line) < 1.15 * LINE


@pytest.mark.parametrize("seed", few_of(range(5), 2))
@pytest.mark.parametrize("factor", [0.05, 0.3, 0.8])
def test_a_pace_follows_a_line_that_gets_slower(factor: float, seed: int) -> None:
    line = Line(seed)
    line.intervals(60)
    line.bytes_per_s = factor * LINE
    line.intervals(20)
    assert factor * LINE * 0.95 < pace_of(line) < factor * LINE * 1.15


@pytest.mark.parametrize("seed", few_of(range(5), 2))
@pytest.mark.parametrize("factor", [1.3, 3.0, 20.0])
def test_a_pace_follows_a_line_that_gets_faster(factor: float, seed: int) -> None:
    line = Line(seed)
    line.intervals(60)
    line.bytes_per_s = factor * LINE
    line.intervals(40)
    assert factor * LINE * 0.95 < pace_of(line) < factor * LINE * 1.15


@pytest.mark.parametrize("seed", few_of(range(5), 2))
def test_a_first_interval_that_was_slow_because_of_others_is_made_up_for(seed: int) -> None:
    line = Line(seed)
    line.others = LINE / 4
    line.intervals(3)
    line.others = math.inf
    line.intervals(16)
    assert 0.95 * LINE < pace_of(line) < 1.15 * LINE


@pytest.mark.parametrize("others", [0.02, 0.5, 0.9])
def test_others_that_are_slow_do_not_lower_a_pace(others: float) -> None:
    line, rng = Line(1), random.Random(1)
    line.intervals(20)
    for _ in range(100):
        line.others = line.bytes_per_s * rng.uniform(0.5, 1.0) * others
        line.interval()
        assert pace_of(line) > 0.93 * LINE
    line.others = math.inf
    assert line.interval() > 0.93 * LINE


def test_bursts_that_wait_for_others_do_not_lower_a_pace() -> None:
    """Half of the time others are waited for: a slower pace would make the rest longer, and look slower still."""
    line = Line(1)
    line.intervals(20)
    for _ in range(200):
        line.pace.add(MonitorInterval(1 / (1 / min(pace_of(line), LINE) + 1 / LINE), 0.0))
    assert line.interval() > 0.93 * LINE


@pytest.mark.parametrize("seed", few_of(range(5), 2))
def test_members_that_get_on_together_all_find_their_lines(seed: int) -> None:
    """The slowest pace holds all up, and the first interval has shown all of them too little."""
    rng = random.Random(seed)
    paces = [Pace() for _ in range(4)]
    for pace in paces:
        pace.add(MonitorInterval(LINE * rng.uniform(0.5, 0.8), 0.05))
    for _ in range(16):
        together = min([LINE, *(pace.bytes_per_s or 0.0 for pace in paces)])
        for pace in paces:
            pace.add(MonitorInterval(together * rng.uniform(0.985, 1.005), 0.0))
    assert together == LINE


@pytest.mark.parametrize("seed", few_of(range(5), 2))
@pytest.mark.parametrize("chance", [0.001, 0.01, 0.03, 0.1])
def test_losses_by_chance_do_not_lower_a_pace_for_long(chance: float, seed: int) -> None:
    line = Line(seed)
    rng = random.Random(seed)
    line.chance = lambda: max(0.0, rng.gauss(chance, chance / 10))
    line.intervals(20)
    rates = line.intervals(300)
    assert sum(rates) / len(rates) > 0.93 * (1 - chance) * LINE
    assert min(rates) > 0.75 * (1 - chance) * LINE


@pytest.mark.parametrize("seed", few_of(range(20), 3))
def test_losses_that_come_and_go_do_not_lower_a_pace_without_end(seed: int) -> None:
    line = Line(seed)
    rng = random.Random(seed)
    line.chance = lambda: rng.choice([0.0, 0.0, rng.uniform(0, 0.08)])
    rates = line.intervals(1000)
    assert sum(rates) / len(rates) > 0.85 * LINE
    assert min(rates) > 0.6 * LINE


def test_a_pace_has_a_bound() -> None:
    pace = Pace()
    pace.add(MonitorInterval(1.0, 0.0))
    for _ in range(300):
        pace.add(MonitorInterval(math.inf, 0.0))
    assert pace.bytes_per_s == MAX_PACE


# intervals


def test_the_rate_of_an_interval_is_that_of_its_best_half() -> None:
    """It waits for others, sends 10 MB a second for 3 s, and waits again."""
    intervals = IntervalSampler()
    delivered = 0
    for tick in range(21):
        intervals.add(tick / 5, Delivery(delivered, 2 * delivered, delivered // 10, 0.0))
        delivered += 2 * MB if 3 <= tick < 18 else 0
    assert intervals.seconds == pytest.approx(4.0)
    interval = intervals.interval()
    assert interval is not None
    assert interval.best == pytest.approx(10 * MB)
    assert interval.loss == pytest.approx(0.05)


def test_an_interval_that_is_short_or_without_bytes_gives_no_rate() -> None:
    intervals = IntervalSampler()
    assert intervals.interval() is None
    intervals.add(0.0, Delivery(0, 0, 0, 0.0))
    intervals.add(2.0, Delivery(2 * MB, 2 * MB, 0, 0.0))
    assert intervals.interval() is None
    intervals.add(4.0, Delivery(4 * MB, 4 * MB, 0, 0.0))
    assert intervals.interval() == MonitorInterval(MB, 0.0, backlogged=0.0)
    intervals.begin()
    assert intervals.seconds == 0.0
    intervals.add(5.0, Delivery(4 * MB, 4 * MB, 0, 0.0))
    intervals.add(9.0, Delivery(4 * MB, 4 * MB, 0, 0.0))
    assert intervals.interval() is None


def test_an_interval_in_which_the_loop_was_held_up_still_has_its_rate() -> None:
    intervals = IntervalSampler()
    intervals.add(0.0, Delivery(0, 0, 0, 0.0))
    intervals.add(4.0, Delivery(8 * MB, 8 * MB, 0, 0.0))
    assert intervals.interval() == MonitorInterval(2 * MB, 0.0, backlogged=0.0)


def test_an_interval_spent_waiting_for_other_peers_does_not_measure_the_line() -> None:
    pace = Pace()
    pace.add(MonitorInterval(best=5.0 * MB, loss=0.0, backlogged=0.3))
    assert pace.bytes_per_s is None, "as free as ever"
    pace.add(MonitorInterval(best=11.0 * MB, loss=0.0, backlogged=0.7))
    assert pace.line == 11 * MB
    pace.add(MonitorInterval(best=12.0 * MB, loss=0.0, backlogged=0.0))
    assert pace.line == 12 * MB, "what a line has carried, it carries"


def test_an_interval_tells_how_long_it_was_backlogged() -> None:
    intervals = IntervalSampler()
    intervals.add(10.0, Delivery(0, 0, 0, 100.0))
    intervals.add(12.0, Delivery(4 * MB, 4 * MB, 0, 102.0))
    intervals.add(14.0, Delivery(8 * MB, 8 * MB, 0, 103.0))
    interval = intervals.interval()
    assert interval is not None
    assert interval.backlogged == pytest.approx(0.75)
