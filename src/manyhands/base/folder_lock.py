"""A folder that one process has for itself."""

from __future__ import annotations

from pathlib import Path

import filelock

from manyhands.base.errors import ConfigError


class FolderInUse(ConfigError):
    """Another process has it."""


def locked_folder(path: Path, what: str, lock_name: str) -> filelock.BaseFileLock:
    """Make a folder if it does not exist, and keep it to this process until the lock is released.

    Args:
        what: how the user named it, for errors.
        lock_name: of the file in it that is locked; two locks of different names do not mind each other.
    Raises:
        FolderInUse: another process has the lock.
        ConfigError: it cannot be used at all.
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
