"""A picture of the run from the events of a monitor, in memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from manyhands.monitor.events import Event, HeldoutSeen, ProgressMade, StepMade
from manyhands.monitor.picture import Leader, Point, RunEvent, RunPicture
from manyhands.monitor.web.source import thinned

MAX_POINTS = 100_000
MAX_EVENTS = 50


class LiveSource:
    """Adds up the events of a :class:`manyhands.monitor.RunMonitor`; knows nothing of single peers.

    Args:
        looked_at: returns when the monitor last looked at the run, in seconds since 1970; 0 before that.
    """

    def __init__(self, run_id: str, looked_at: Callable[[], float]) -> None:
        self._looked_at = looked_at
        self._lock = threading.Lock()
        self._picture = RunPicture(run_id=run_id, time=0.0)
        self._eta: tuple[float, float] | None = None  # the time of an estimate, and the estimate in seconds
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._events: deque[RunEvent] = deque(maxlen=MAX_EVENTS)

    def add(self, event: Event) -> None:
        """Take over an event, as ``on_event`` of the monitor."""
        now = time.time()
        with self._lock:
            if isinstance(event, ProgressMade):
                self._add_progress(event, now)
            elif isinstance(event, StepMade):
                self._add_step(event, now)
            elif isinstance(event, HeldoutSeen):
                self._add_heldout(event)

    def _add_progress(self, event: ProgressMade, now: float) -> None:
        if event.step < self._picture.step:
            text = f"The run went back from step {self._picture.step} to step {event.step}."
            self._events.appendleft(RunEvent(time=now, kind="restarted", text=text, step=event.step))
        self._eta = None if event.eta_s is None else (now, event.eta_s)
        self._change(
            step=event.step,
            samples=event.samples,
            target_batch_size=event.target_batch_size,
            num_peers=event.num_peers,
            samples_per_second=event.samples_per_second,
            events=list(self._events),
        )

    def _add_step(self, event: StepMade, now: float) -> None:
        point = Point(
            time=now,
            step=event.step,
            loss=event.loss,
            samples=event.samples,
            samples_per_second=event.samples_per_second,
            peers=event.alive_peers,
        )
        self._points.append(point)
        self._change(last=point, committed_samples=self._picture.committed_samples + event.samples)

    def _add_heldout(self, event: HeldoutSeen) -> None:
        for place in range(len(self._points) - 1, -1, -1):
            if self._points[place].step == event.step:
                self._points[place] = msgspec.structs.replace(self._points[place], heldout_loss=event.heldout_loss)
                if place == len(self._points) - 1:
                    self._change(last=self._points[place])
                return

    def _change(self, **fields: object) -> None:
        self._picture = msgspec.structs.replace(self._picture, **fields)

    def picture(self) -> RunPicture:
        looked_at = self._looked_at()
        with self._lock:
            if looked_at != self._picture.time:
                eta_s = max(self._eta[0] + self._eta[1] - looked_at, 0.0) if self._eta is not None else None
                self._change(time=looked_at, eta_s=eta_s)
            return self._picture

    def points(self, since: float, limit: int) -> list[Point]:
        with self._lock:
            return thinned([point for point in self._points if point.time >= since], limit)

    def events(self, limit: int) -> list[RunEvent]:
        with self._lock:
            return list(self._events)[:limit]

    def leader_of(self, peer_id: str) -> Leader | None:
        return None
