"""The source of the page of a real run."""

from __future__ import annotations

from manyhands.monitor.monitor import RunMonitor
from manyhands.monitor.monitor_events import Happened, MonitorEvent
from manyhands.monitor.picture import LeaderboardRow, Point, RunEvent, RunPicture
from manyhands.monitor.web.source import thinned

FINER = 10
"""Points that are read for each one that is shown. Few points have a held-out loss: a shown point takes it
over from one of those that it stands for."""


class MonitorSource:
    """The run of a :class:`manyhands.monitor.RunMonitor`.

    Attributes:
        num_aborted: rounds that were aborted, since the start of the monitor.
    """

    def __init__(self, monitor: RunMonitor) -> None:
        self.num_aborted = 0
        self._monitor = monitor
        self._nothing = RunPicture(run_id=monitor.run_id, time=0.0)

    def add(self, event: MonitorEvent) -> None:
        """Take over an event, as ``on_event`` of the monitor."""
        if isinstance(event, Happened) and event.kind == "aborted":
            self.num_aborted += 1

    def picture(self) -> RunPicture:
        return self._monitor.picture or self._nothing

    def points(self, since: float, limit: int) -> list[Point]:
        return thinned(self._monitor.history.points(since, FINER * limit), limit)

    def points_after(self, step: int, since: float, limit: int) -> list[Point]:
        return self._monitor.history.points_after(step, since, limit)

    def events(self, limit: int) -> list[RunEvent]:
        return self._monitor.history.events(limit)

    def leader_of(self, peer_id: str) -> LeaderboardRow | None:
        return self._monitor.leader_of(peer_id)
