"""The figures of collaboration.py, from the events of its trainers. Pure; collaboration.py defines each figure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]

SETTLE_S = 5.0
"""The survivors' share counts from so long after the kill."""
LONG_CALLS = 2.0
"""A call of step() is long if it takes so many times the longest one of the steady part."""


@dataclass(frozen=True)
class Window:
    """A part of a run, in seconds of the monotonic clock."""

    begin: float
    end: float

    def overlap(self, begin: float, end: float) -> float:
        return max(0.0, min(self.end, end) - max(self.begin, begin))

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class Trainer:
    """The events of one trainer.

    Attributes:
        batch: samples of a batch.
        pace_s: of a batch.
        started: when its process was started.
    """

    rank: int
    batch: int
    pace_s: float
    started: float
    events: list[Event] = field(default_factory=list)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def ideal(self) -> float:
        """Samples per second if it never waited."""
        return self.batch / self.pace_s

    def computed(self, window: Window) -> float:
        """Samples that were computed in the window; a batch counts by the share of its time in it."""
        times = [(event["began"], event["computed"]) for event in self.of("batch")]
        num_batches: float = sum(window.overlap(began, ended) / (ended - began) for began, ended in times)
        return self.batch * num_batches

    def waited(self, window: Window) -> float:
        """Seconds of the window in step()."""
        return sum(window.overlap(event["computed"], event["returned"]) for event in self.of("batch"))

    def longest_call_s(self, window: Window) -> float:
        return max(
            (e["returned"] - e["computed"] for e in self.of("batch") if _is_in(e["computed"], window)), default=0
        )

    def first_contribution(self) -> float | None:
        """When the first batch ended that counts in a step."""
        step = next((event for event in self.of("step") if event["contributed"]), None)
        if step is None:
            return None
        ends = [event["computed"] for event in self.of("batch") if event["computed"] <= step["frozen_at"]]
        return float(ends[-min(len(ends), round(step["contributed"] / self.batch))]) if ends else None


def _is_in(at: float, window: Window) -> bool:
    return window.begin <= at <= window.end


class Steps:
    """The global steps of a run.

    Attributes:
        at: when the first trainer had each step, of those that a round made.
        samples: of all trainers in each step.
    """

    def __init__(self, trainers: Iterable[Trainer]) -> None:
        self.at: dict[int, float] = {}
        self.samples: dict[int, float] = {}
        self.members: dict[int, int] = {}
        for trainer in trainers:
            for event in trainer.of("step"):
                number = event["step"]
                self.samples[number] = self.samples.get(number, 0) + event["contributed"]
                if (event["members"] or 0) > 1:
                    self.at[number] = min(event["at"], self.at.get(number, event["at"]))
                    self.members[number] = max(event["members"], self.members.get(number, 0))

    def within(self, window: Window) -> list[int]:
        return sorted(number for number, at in self.at.items() if _is_in(at, window))

    def aligned(self, window: Window) -> Window:
        """From the first to the last step in the window; the window itself if there are fewer than three."""
        numbers = self.within(window)
        times = sorted(self.at[number] for number in numbers)
        return Window(times[0], times[-1]) if len(times) >= 3 else window

    def used_until(self, number: int) -> float:
        """Samples of all steps up to this one."""
        return sum(samples for step, samples in self.samples.items() if step <= number)


def share_of_ideal(trainers: Sequence[Trainer], window: Window) -> float:
    return sum(trainer.computed(window) for trainer in trainers) / (
        window.seconds * sum(trainer.ideal for trainer in trainers)
    )


def steady_figures(trainers: Sequence[Trainer], steps: Steps, window: Window, target: int) -> dict[str, float]:
    """Of the steady part."""
    window = steps.aligned(window)
    numbers = steps.within(window)
    result = {
        "share_of_ideal": share_of_ideal(trainers, window),
        "samples_per_s_used": sum(steps.samples[number] for number in numbers[1:]) / window.seconds,
        "global_steps_per_min": 60 * (len(numbers) - 1) / window.seconds,
    }
    if len(numbers) > 1:
        waited = statistics.fmean(trainer.waited(window) for trainer in trainers)
        result["wait_per_step_s"] = waited / (len(numbers) - 1)
        result["samples_over_target"] = statistics.median(steps.samples[number] for number in numbers[1:]) / target
    batches = [
        (event["gradients_s"], trainer.pace_s)
        for trainer in trainers
        for event in trainer.of("batch")
        if _is_in(event["began"], window)
    ]
    result["slow_batches"] = sum(took_s > pace_s for took_s, pace_s in batches) / len(batches)
    return result


def after_kill_figures(survivors: Sequence[Trainer], steady: Window, after: Window) -> dict[str, float]:
    """Between the kill and the start of the newcomer."""
    longest_s = max(trainer.longest_call_s(steady) for trainer in survivors)
    ends = [
        event["returned"]
        for trainer in survivors
        for event in trainer.of("batch")
        if _is_in(event["returned"], after) and event["returned"] - event["computed"] > LONG_CALLS * longest_s
    ]
    return {
        "after_kill_share_of_ideal": share_of_ideal(survivors, Window(after.begin + SETTLE_S, after.end)),
        "recovery_s": max(ends, default=after.begin) - after.begin,
    }


def newcomer_figures(
    newcomer: Trainer, others: Sequence[Trainer], before: Window, after: Window
) -> dict[str, float | None]:
    """Of the part that begins with the start of the newcomer."""
    contributed = newcomer.first_contribution()
    imported = next((event["at"] for event in newcomer.of("imported")), None)
    before = Window(before.begin + SETTLE_S, before.end)
    return {
        "newcomer_first_contribution_s": contributed - newcomer.started if contributed is not None else None,
        "newcomer_beyond_imports_s": contributed - imported
        if contributed is not None and imported is not None
        else None,
        "others_slowed_by_newcomer": 1 - share_of_ideal(others, after) / share_of_ideal(others, before),
    }


def partial_or_failed(trainers: Sequence[Trainer], steps: Steps, lived_until: dict[int, float], window: Window) -> int:
    """Steps of which a round failed, or was made without a trainer that was there."""
    bad = {event["step"] for trainer in trainers for event in trainer.of("failed") if _is_in(event["at"], window)}
    first = {trainer.rank: trainer.first_contribution() for trainer in trainers}
    previous_at = window.begin
    for number in steps.within(window):
        there = [
            rank
            for rank, since in first.items()
            if since is not None and since < previous_at and lived_until[rank] > previous_at
        ]
        if steps.members[number] < len(there):
            bad.add(number)
        previous_at = steps.at[number]
    return len(bad)


def at_samples(losses: dict[int, float], steps: Steps, mark: int) -> float | None:
    """The loss after so many samples, interpolated between two steps whose loss is known; None if it is not known."""
    points = sorted((steps.used_until(number), loss) for number, loss in losses.items())
    if (exact := dict(points).get(mark)) is not None:
        return exact
    for (samples, loss), (more, later) in itertools.pairwise(points):
        if samples <= mark <= more and more > samples:
            return loss + (later - loss) * (mark - samples) / (more - samples)
    return None


def medians(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The median of each figure of several runs, and its least and greatest value; a figure may lack in some runs."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    found: dict[str, Any] = {}
    spread: dict[str, list[float]] = {}
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        found[name] = round(statistics.median(values), 4) if values else None
        if values:
            spread[name] = [round(min(values), 4), round(max(values), 4)]
    return found, spread
