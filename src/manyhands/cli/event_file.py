"""Events as JSON lines: one program writes them, another follows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from manyhands.base.errors import ConfigError

E = TypeVar("E")

VERSION = 1
"""Of the format, as docs/events.md has it: raised when a field goes or means something else, not when one is added."""


class EventWriter:
    """Appends events to a file, each with the time and the version of the format; without a path, drops them.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        try:
            self._file = path.open("ab", buffering=0) if path is not None else None
        except OSError as error:
            raise ConfigError(f"--events {path}: {error.strerror}; name a file that can be written") from error

    def __call__(self, event: msgspec.Struct) -> None:
        if self._file is not None:
            common = {"time": round(time.time(), 3), "version": VERSION}
            self._file.write(msgspec.json.encode(msgspec.to_builtins(event) | common) + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class EventFollower(Generic[E]):
    """Reads the events that a writer appends, as they come."""

    def __init__(self, path: Path, kinds: Any) -> None:
        self._path = path
        self._decoder: msgspec.json.Decoder[E] = msgspec.json.Decoder(kinds)
        self._offset = 0

    def new_events(self) -> Iterator[E]:
        """What was appended since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    return
                self._offset += len(line)
                yield self._decoder.decode(line)
