"""Reads back what the curves were written to."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path


def tensorboard_points(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """The global step and the named values of each event in a folder, those of each file in their order."""
    from tensorboardX.proto.event_pb2 import Event

    events = (Event.FromString(raw) for file in sorted(folder.rglob("events*")) for raw in _records(file.read_bytes()))
    return [
        (event.step, {value.tag: value.simple_value for value in event.summary.value})
        for event in events
        if event.HasField("summary")
    ]


def _records(data: bytes) -> Iterator[bytes]:
    """Of the TFRecord format: length, its checksum, the record, its checksum."""
    while data:
        (length,) = struct.unpack_from("<Q", data)
        yield data[12 : 12 + length]
        data = data[12 + length + 4 :]


def wandb_points(folder: Path) -> list[dict[str, float]]:
    """The points of all offline runs in a folder, without what wandb adds."""
    from wandb.proto.wandb_internal_pb2 import Record

    points = []
    for file in sorted(folder.rglob("run-*.wandb")):
        for raw in _log_records(file.read_bytes()):
            record = Record.FromString(raw)
            if record.HasField("history"):
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                points.append({name: value for name, value in items.items() if not name.startswith("_")})
    return points


def trackio_points(folder: Path) -> list[dict[str, float]]:
    """The points of all runs in a folder of Trackio, which has a database for each project."""
    points = []
    for file in sorted(folder.glob("*.db")):
        with closing(sqlite3.connect(file)) as database:
            rows = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
        points += [json.loads(metrics) | {"step": step} for step, metrics in rows]
    return points


def _log_records(data: bytes) -> Iterator[bytes]:
    """Of LevelDB's log format, which begins with 7 bytes of wandb's own: blocks of records, and parts of these."""
    block_bytes, last_types = 1 << 15, (1, 4)
    place, record = 7, b""
    while place + 7 <= len(data):
        left = block_bytes - place % block_bytes
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in last_types:
            yield record
            record = b""
