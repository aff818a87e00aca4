"""Events written by one program are read by another, whole."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from manyhands.base.errors import ConfigError
from manyhands.cli.first_peer_command import StandingBy
from manyhands.cli.output.event_file import EventFollower, EventWriter
from manyhands.monitor.monitor_events import Listening, MonitorEvent
from manyhands.recipes.albert.trainer_events import Counts, TrainerEvent

DOCS = Path(__file__).parents[4] / "docs" / "reference" / "events.md"


def test_events_arrive_in_order_and_never_in_halves(tmp_path: Path) -> None:
    path = tmp_path / "events"
    follower: EventFollower[MonitorEvent] = EventFollower(path, MonitorEvent)
    assert list(follower.read_new()) == []
    write = EventWriter(path)
    write(Listening("A", ["/ip4/127.0.0.1/tcp/1"]))
    write(Listening("B", []))
    assert [event.peer_id for event in follower.read_new()] == ["A", "B"]
    with path.open("ab") as file:
        file.write(b'{"type":"listening","peer_id":"C",')
    assert list(follower.read_new()) == []
    with path.open("ab") as file:
        file.write(b'"addresses":[]}\n')
    assert [event.peer_id for event in follower.read_new()] == ["C"]
    write.close()


def test_each_record_says_when_it_was_written_and_in_which_format(tmp_path: Path) -> None:
    write = EventWriter(tmp_path / "events")
    before = time.time()
    write(StandingBy(3, 2, 1, 4096))
    write.close()
    record = json.loads((tmp_path / "events").read_text())
    assert before - 0.01 < record.pop("time") < time.time() + 0.01
    assert record == {
        "type": "standing_by", "version": 1,
        "num_known_peers": 3, "num_connected_peers": 2, "num_records": 1, "memory_bytes": 4096,
    }  # fmt: skip


def test_all_events_and_their_fields_are_documented() -> None:
    text = DOCS.read_text()
    kinds = [*get_args(MonitorEvent), *get_args(TrainerEvent), StandingBy]
    for kind in kinds:
        row = next((line for line in text.splitlines() if line.startswith(f"| `{kind.__struct_config__.tag}` |")), "")
        missing = [field.name for field in msgspec.structs.fields(kind) if f"`{field.name}`" not in row]
        assert not missing, (kind, row)
    assert all(f"| `{field.name}` |" in text for field in msgspec.structs.fields(Counts))
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds), "a tag means one thing"


def test_an_event_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--events"):
        EventWriter(tmp_path / "missing" / "events")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device of this system is always full")
def test_a_full_disk_is_said_once_and_drops_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events"
    path.symlink_to("/dev/full")
    caplog.set_level("INFO")
    write = EventWriter(path)
    for _ in range(3):
        write(Listening("A", []))
    assert [record.message for record in caplog.records] == [
        f"Cannot write --events {path}: No space left on device; events are dropped meanwhile"
    ]
    path.unlink()
    write(Listening("B", []))
    assert "is written again; 3 events are missing in it" in caplog.text
    assert [event.peer_id for event in EventFollower(path, MonitorEvent).read_new()] == ["B"]
    write.close()


@pytest.mark.skipif(sys.platform == "win32", reason="files of this system have no limit")
def test_a_line_of_which_the_disk_takes_a_part_is_not_left_in_halves(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "events"
    write = EventWriter(path)
    write(Listening("A", []))
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, most))
    try:
        write(Listening("B", []))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    write(Listening("C", []))
    assert [event.peer_id for event in EventFollower(path, MonitorEvent).read_new()] == ["A", "C"]
    write.close()


@pytest.mark.parametrize("removes", [False, True])
def test_a_file_that_was_moved_away_or_removed_is_begun_anew(tmp_path: Path, removes: bool) -> None:
    path = tmp_path / "events"
    write = EventWriter(path)
    write(Listening("A", []))
    path.rename(tmp_path / "events.1")
    if removes:
        (tmp_path / "events.1").unlink()
    write(Listening("B", []))
    write.close()
    assert [event.peer_id for event in EventFollower(path, MonitorEvent).read_new()] == ["B"]


def test_event_writing_goes_on_when_a_missing_folder_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    write = EventWriter(folder / "events")
    folder.rename(tmp_path / "away")
    for _ in range(2):
        write(Listening("A", []))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    (tmp_path / "away").rename(folder)
    write(Listening("B", []))
    write.close()
    assert [event.peer_id for event in EventFollower(folder / "events", MonitorEvent).read_new()] == ["B"]
