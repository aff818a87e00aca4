"""Locks a folder for one process."""

from __future__ import annotations

from pathlib import Path

import filelock

from manyhands.base.errors import ConfigError


class FolderInUse(ConfigError):
    """Another process has locked the folder."""


def locked_folder(path: Path, what: str, lock_name: str) -> filelock.BaseFileLock:
    """Create a folder if needed, and lock it for this process until the lock is released.

    Args:
        what: how the user named the folder, for errors.
        lock_name: of the lock file in it; locks with different names are independent.
    Raises:
        FolderInUse: another process has the lock.
        ConfigError: the folder cannot be used.
    """
    lock = filelock.FileLock(path / lock_name, timeout=0, thread_local=False)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout as error:
        raise FolderInUse(
            f"{what} {path} is in use by another peer; stop that one, or give each peer a {what} of its own"
        ) from error
    except FileExistsError as error:
        raise ConfigError(f"{what} {path} is a file; name a folder, or one that does not exist yet") from error
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}; name a folder that can be written") from error
    return lock
