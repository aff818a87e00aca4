"""A picture of a run from the events of a monitor alone: without its peers, which they do not name."""

from __future__ import annotations

import threading
import time

from manyhands.monitor.events import Event, HeldoutSeen, ProgressMade, StepMade
from manyhands.monitor.picture import Point, RunPicture

MAX_POINTS = 4096


class PictureOfEvents:
    """Makes pictures, for a thread that draws them."""

    def __init__(self, run_id: str) -> None:
        self._lock = threading.Lock()
        self._picture = RunPicture(run_id=run_id, time=0.0)
        self._points: list[Point] = []

    def add(self, event: Event) -> None:
        """Note an event."""
        with self._lock:
            if isinstance(event, ProgressMade):
                self._note_progress(event)
            elif isinstance(event, StepMade):
                self._note_point(
                    Point(
                        time=time.time(), step=event.step, loss=event.loss, samples=event.samples,
                        samples_per_second=event.samples_per_second, peers=event.alive_peers,
                    )
                )  # fmt: skip
            elif isinstance(event, HeldoutSeen):
                self._note_point(Point(time=time.time(), step=event.step, heldout_loss=event.heldout_loss))

    def _note_progress(self, event: ProgressMade) -> None:
        self._picture = RunPicture(
            run_id=self._picture.run_id, time=time.time(), step=event.step, samples=event.samples,
            target_batch_size=event.target_batch_size, num_peers=event.num_peers,
            samples_per_second=event.samples_per_second, eta_s=event.eta_s,
        )  # fmt: skip

    def _note_point(self, point: Point) -> None:
        if len(self._points) >= MAX_POINTS:
            del self._points[1::2]
        self._points.append(point)

    def now(self) -> tuple[RunPicture, list[Point]] | None:
        """The picture and its points, oldest first; None before any progress was seen."""
        with self._lock:
            return (self._picture, list(self._points)) if self._picture.time else None
