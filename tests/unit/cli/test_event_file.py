"""Events written by one program are read by another, whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.base.errors import ConfigError
from manyhands.cli.event_file import EventFollower, EventWriter
from manyhands.monitor.events import Event, Listening


def test_events_arrive_in_order_and_never_in_halves(tmp_path: Path) -> None:
    path = tmp_path / "events"
    follower: EventFollower[Event] = EventFollower(path, Event)
    assert list(follower.new_events()) == []
    write = EventWriter(path)
    write(Listening("A", ["/ip4/127.0.0.1/tcp/1"]))
    write(Listening("B", []))
    assert [event.peer_id for event in follower.new_events()] == ["A", "B"]
    with path.open("ab") as file:
        file.write(b'{"type":"listening","peer_id":"C",')
    assert list(follower.new_events()) == []
    with path.open("ab") as file:
        file.write(b'"addresses":[]}\n')
    assert [event.peer_id for event in follower.new_events()] == ["C"]
    write.close()


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--events"):
        EventWriter(tmp_path / "missing" / "events")
