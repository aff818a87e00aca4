"""The page's view of a monitor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from manyhands.monitor.history import History
from manyhands.monitor.monitor import RunMonitor
from manyhands.monitor.monitor_events import Happened, StepMade
from manyhands.monitor.picture import Point, RunEvent
from manyhands.monitor.web import MonitorSource


@pytest.fixture
def history() -> Iterator[History]:
    history = History("r")
    yield history
    history.close()


@pytest.fixture
def source(history: History) -> MonitorSource:
    not_started: Any = None  # the peer of a monitor that does not start
    return MonitorSource(RunMonitor(not_started, "r", lambda event: None, history=history))


def test_before_the_first_look_there_is_an_empty_picture(source: MonitorSource) -> None:
    assert (source.picture().run_id, source.picture().time) == ("r", 0.0)
    assert source.picture() is source.picture()
    assert source.leader_of("nobody") is None


def test_aborted_rounds_are_counted(source: MonitorSource) -> None:
    source.add(Happened("aborted", "A round was aborted.", 3, "", ""))
    source.add(Happened("joined", "ada joined.", 3, "peer", "ada"))
    source.add(StepMade(3, 2.5, 1, 64, 5.0))
    assert source.num_aborted == 1


def test_history_is_shown_and_thinning_keeps_held_out_losses(source: MonitorSource, history: History) -> None:
    history.add_points(
        Point(time=float(step), step=step, loss=1.0, heldout_loss=2.0 if step == 93 else None) for step in range(1, 101)
    )
    history.add_events([RunEvent(time=5.0, kind="joined", text="ada joined.")])
    shown = source.points(0.0, 10)
    assert len(shown) == 10
    assert [point.step for point in shown if point.heldout_loss == 2.0] == [100]
    assert [point.step for point in source.points(99.0, 10)] == [99, 100]
    assert [event.text for event in source.events(10)] == ["ada joined."]
