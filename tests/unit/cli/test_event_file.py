"""Events written by one program are read by another, whole."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from manyhands.base.errors import ConfigError
from manyhands.cli.event_file import EventFollower, EventWriter
from manyhands.cli.first_peer_command import StandingBy
from manyhands.monitor.events import Event, Listening
from manyhands.recipes.albert.events import Counts
from manyhands.recipes.albert.events import Event as TrainerEvent

DOCS = Path(__file__).parents[3] / "docs" / "events.md"


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


def test_each_record_says_when_it_was_written_and_in_which_format(tmp_path: Path) -> None:
    write = EventWriter(tmp_path / "events")
    before = time.time()
    write(StandingBy(3, 2, 1, None))
    write.close()
    record = json.loads((tmp_path / "events").read_text())
    assert before - 0.01 < record.pop("time") < time.time() + 0.01
    assert record == {
        "type": "standing_by", "version": 1,
        "num_known_peers": 3, "num_connected_peers": 2, "num_records": 1, "memory_bytes": None,
    }  # fmt: skip


def test_all_events_and_their_fields_are_documented() -> None:
    text = DOCS.read_text()
    kinds = [*get_args(Event), *get_args(TrainerEvent), StandingBy]
    for kind in kinds:
        row = next((line for line in text.splitlines() if line.startswith(f"| `{kind.__struct_config__.tag}` |")), "")
        missing = [field.name for field in msgspec.structs.fields(kind) if f"`{field.name}`" not in row]
        assert not missing, (kind, row)
    assert all(f"| `{field.name}` |" in text for field in msgspec.structs.fields(Counts))
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds), "a tag means one thing"


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--events"):
        EventWriter(tmp_path / "missing" / "events")
