"""Event files of JSON lines: one process appends to them, another follows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from manyhands.cli.output.line_file import LineFile

E = TypeVar("E")

VERSION = 1
"""Version of the format (docs/reference/events.md). It is raised when a field is removed or redefined."""


class EventWriter:
    """Appends events to a :class:`LineFile`, each with the time and the version of the format.

    Without a path, events are dropped.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = LineFile(path, "--events", "events") if path is not None else None

    def __call__(self, event: msgspec.Struct) -> None:
        if self._file is not None:
            common = {"time": round(time.time(), 3), "version": VERSION}
            self._file.append(msgspec.json.encode(msgspec.to_builtins(event) | common) + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class EventFollower(Generic[E]):
    """Reads events from a file as another process appends them."""

    def __init__(self, path: Path, kinds: Any) -> None:
        self._path = path
        self._decoder: msgspec.json.Decoder[E] = msgspec.json.Decoder(kinds)
        self._offset = 0

    def read_new(self) -> Iterator[E]:
        """Events appended since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    return
                self._offset += len(line)
                yield self._decoder.decode(line)
