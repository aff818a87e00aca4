"""Locks a folder for one process."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import filelock

from manyhands.base.errors import ConfigError

LOCK_NAME = "lock"

_guard = threading.Lock()
_held: dict[Path, set[str]] = {}
"""The lock files that this process has locked, each with the purposes of its folder."""


class FolderInUse(ConfigError):
    """The folder is locked by another process, or has the same use in this one."""


class FolderLock:
    """A folder that is locked for this process until :meth:`release`. It is created if missing.

    A process may use one folder for several purposes, such as its identity and its checkpoints. They share one lock, so
    another process can use the folder for none of them.

    Args:
        what: the purpose, by which errors name the folder to the user; a process can lock a folder once for each.
        lock_name: name of the lock file; locks with different names are independent.
    Attributes:
        is_new: whether the folder was created now.
    Raises:
        FolderInUse: another process has the lock, or this one uses the folder for the same purpose.
        ConfigError: the folder cannot be used.
    """

    def __init__(self, path: Path, what: str, lock_name: str = LOCK_NAME) -> None:
        self._what = what
        self.is_new = False
        try:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700, parents=True)
                self.is_new = True
            if not path.is_dir():
                raise FileExistsError
            self._file = path.resolve() / lock_name
            self._lock = filelock.FileLock(self._file, timeout=0, thread_local=False, is_singleton=True)
            with _guard:
                if what in _held.get(self._file, ()):
                    raise filelock.Timeout(str(self._file))
                self._lock.acquire()  # counts the purposes
                _held.setdefault(self._file, set()).add(what)
        except filelock.Timeout as error:
            raise FolderInUse(
                f"{what} {path} is in use by another peer; stop that one, or give each peer a {what} of its own"
            ) from error
        except FileExistsError as error:
            raise ConfigError(f"{what} {path} is a file; name a folder, or one that does not exist yet") from error
        except OSError as error:
            raise ConfigError(f"{what} {path}: {error.strerror}; name a folder that can be written") from error

    def release(self) -> None:
        """Unlock the folder, unless it has another use here. May be called twice."""
        with _guard:
            if self._what in (held := _held.get(self._file, set())):
                held.remove(self._what)
                self._lock.release()
