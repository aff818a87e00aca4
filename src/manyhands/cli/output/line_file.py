"""A file to which whole lines are appended for weeks: it outlives log rotation and a full disk."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from manyhands.base.errors import ConfigError

logger = logging.getLogger(__name__)


class LineFile:
    """Appends lines to a file, each in one piece and at once.

    The file is opened anew when it has been moved or removed, as log rotation does. While the disk is full, lines are
    dropped: one warning says so, and one line says how many are missing once there is room. Not for use by several
    threads at a time.

    Args:
        option: the option that named the file, for messages.
        what: the name of the lines in the plural, for messages.
    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, option: str, what: str) -> None:
        self._path = path
        self._name = f"{option} {path}"
        self._what = what
        self._num_dropped = 0
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"{self._name}: {error.strerror}; name a file that can be written") from error

    def append(self, line: bytes) -> None:
        """Append a line, which ends with a line feed; never raises OSError."""
        try:
            self._append(line)
        except OSError as error:
            self._num_dropped += 1
            if self._num_dropped == 1:  # counted first: the warning may be meant for this file
                logger.warning("Cannot write %s: %s; %s are dropped meanwhile", self._name, error.strerror, self._what)
            return
        if num_dropped := self._num_dropped:
            self._num_dropped = 0
            logger.info("%s is written again; %d %s are missing in it", self._name, num_dropped, self._what)

    def _append(self, line: bytes) -> None:
        if self._file.closed or self._is_elsewhere():
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
        begin = self._file.seek(0, os.SEEK_END) if self._file.seekable() else 0  # a pipe cannot be sought
        if self._file.write(line) != len(line):
            self._file.truncate(begin)  # readers get only whole lines
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _is_elsewhere(self) -> bool:
        """Whether the path names another file by now, or none."""
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Close the file. A later line opens it again."""
        self._file.close()
