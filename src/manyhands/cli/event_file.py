"""Event files of JSON lines: one process appends to them, another follows."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from manyhands.base.errors import ConfigError
from manyhands.cli import leaving

logger = logging.getLogger(__name__)
E = TypeVar("E")

VERSION = 1
"""Of the format (docs/reference/events.md): raised when a field is removed or redefined, not when one is added."""


class EventWriter:
    """Appends events to a file, each with the time and the version of the format; without a path, drops them.

    While the disk is full, events are dropped, one warning is logged, and the program goes on. The file is opened anew
    after SIGHUP, by which time a log rotator has moved it.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._num_dropped = 0
        try:
            self._file = path.open("ab", buffering=0) if path is not None else None
        except OSError as error:
            raise ConfigError(f"--events {path}: {error.strerror}; name a file that can be written") from error
        self._num_hangups = leaving.num_hangups

    def __call__(self, event: msgspec.Struct) -> None:
        if self._path is None:
            return
        common = {"time": round(time.time(), 3), "version": VERSION}
        try:
            self._append(msgspec.json.encode(msgspec.to_builtins(event) | common) + b"\n")
        except OSError as error:
            if not self._num_dropped:
                logger.warning("cannot write --events %s: %s; events are dropped meanwhile", self._path, error.strerror)
            self._num_dropped += 1
            return
        if self._num_dropped:
            logger.info("--events %s is written again; %d events are missing in it", self._path, self._num_dropped)
            self._num_dropped = 0

    def _append(self, line: bytes) -> None:
        assert self._path is not None
        if self._file is None or self._num_hangups != leaving.num_hangups:
            self.close()
            self._num_hangups = leaving.num_hangups
            self._file = self._path.open("ab", buffering=0)
        begin = self._file.seek(0, os.SEEK_END) if self._file.seekable() else 0  # a pipe cannot be sought
        if self._file.write(line) != len(line):
            self._file.truncate(begin)  # readers get only whole lines
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class EventFollower(Generic[E]):
    """Reads events from a file as another process appends them."""

    def __init__(self, path: Path, kinds: Any) -> None:
        self._path = path
        self._decoder: msgspec.json.Decoder[E] = msgspec.json.Decoder(kinds)
        self._offset = 0

    def new_events(self) -> Iterator[E]:
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
