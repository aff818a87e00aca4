"""The events of a monitor become a picture."""

from __future__ import annotations

import pytest

from manyhands.monitor.events import HeldoutSeen, ProgressMade, StepMade
from manyhands.monitor.web import LiveSource


class Looked:
    """The time of the monitor's last look."""

    at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    looked = Looked()
    monkeypatch.setattr("manyhands.monitor.web.live.time.time", looked)
    return looked


def test_progress_steps_and_held_out_losses(looked: Looked) -> None:
    source = LiveSource("r", looked)
    assert source.picture().time == 0.0
    looked.at = 100.0
    source.add(ProgressMade(7, 30, 64, 2, 5.5, 6.0))
    source.add(StepMade(7, 2.5, 2, 64, 5.0))
    picture = source.picture()
    assert (picture.step, picture.samples, picture.target_batch_size, picture.num_peers) == (7, 30, 64, 2)
    assert (picture.time, picture.eta_s, picture.committed_samples) == (100.0, 6.0, 64)
    assert source.picture() is picture
    looked.at = 104.0
    assert source.picture().eta_s == 2.0
    looked.at = 110.0
    assert source.picture().eta_s == 0.0
    source.add(StepMade(8, 2.4, 2, 60, 5.0))
    source.add(HeldoutSeen(7, 2.7, 0.1, 0.5))
    source.add(HeldoutSeen(6, 2.9, 0.1, 0.5))  # from before this monitor
    assert [(point.step, point.loss, point.heldout_loss) for point in source.points(0.0, 10)] == [
        (7, 2.5, 2.7), (8, 2.4, None),
    ]  # fmt: skip
    assert [point.step for point in source.points(105.0, 10)] == [8]
    assert source.picture().committed_samples == 124


def test_run_that_goes_back_is_an_event(looked: Looked) -> None:
    source = LiveSource("r", looked)
    source.add(ProgressMade(7, 0, 64, 1, 5.5, None))
    source.add(ProgressMade(5, 0, 64, 1, 5.5, None))
    assert [event.kind for event in source.events(10)] == ["restarted"]
    assert source.picture().events == source.events(10)
    assert source.picture().eta_s is None
