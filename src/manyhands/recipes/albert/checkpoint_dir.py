"""The folder with the checkpoints of one run. Imports no torch: it is looked at before anything is started."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import filelock
import msgspec

from manyhands.base.errors import ConfigError

NUM_KEPT = 2
"""The newest of them; if one is damaged there is another."""
_NAME = re.compile(r"checkpoint-(\d{1,18})")
_ABOUT = "run.json"


class About(msgspec.Struct, frozen=True):
    """What a checkpoint is of.

    Attributes:
        state_digest: of :meth:`manyhands.Optimizer.state_digest`.
    """

    run_id: str
    global_step: int
    state_digest: str


class Checkpoint(NamedTuple):
    """One that is complete."""

    path: Path
    about: About


class CheckpointDir:
    """Finds, adds and removes checkpoints: folders ``checkpoint-STEP``, as the trainers of other libraries name them.

    It belongs to this process until :meth:`close`.

    Raises:
        ConfigError: it cannot be used, another process uses it, or what is in it is another run's.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = filelock.FileLock(path / "lock", timeout=0, thread_local=False)
            self._lock.acquire()
            self._remove_unfinished()
            with self._unfinished(0):
                pass
        except filelock.Timeout as error:
            raise ConfigError(
                f"checkpoint_dir {path} is in use by another trainer; give each trainer a checkpoint_dir of its own"
            ) from error
        except FileExistsError as error:
            raise ConfigError(f"checkpoint_dir {path} is a file; name a folder, or one that does not exist") from error
        except OSError as error:
            raise ConfigError(f"checkpoint_dir {path}: {error.strerror}; name a folder that can be written") from error
        try:
            self.newest()
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Let others use the folder. May be called twice."""
        self._lock.release(force=True)

    def newest(self) -> Checkpoint | None:
        """That of the highest global step.

        Raises:
            ConfigError: it is of another run, or cannot be read.
        """
        steps = self._steps()
        if not steps:
            return None
        path = self._of_step(steps[-1])
        try:
            about = msgspec.json.decode((path / _ABOUT).read_bytes(), type=About)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"checkpoint {path} cannot be read ({error}); remove it to go on without it") from error
        if about.run_id != self._run_id:
            raise ConfigError(
                f"checkpoint {path} is of run {about.run_id!r}, and this is {self._run_id!r}; "
                "give each run a checkpoint_dir of its own"
            )
        return Checkpoint(path, about)

    @contextmanager
    def adding(self, global_step: int, state_digest: str) -> Iterator[Path]:
        """Within the block, a folder to write a checkpoint into; it counts once the block ends without an error.

        Raises:
            OSError: it cannot be written.
        """
        with self._unfinished(global_step) as draft:
            yield draft
            about = About(self._run_id, global_step, state_digest)
            (draft / _ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")
            for file in draft.iterdir():
                _flush(file)
            path = self._of_step(global_step)
            if path.exists():
                shutil.rmtree(path)
            draft.replace(path)
        for step in self._steps()[:-NUM_KEPT]:
            shutil.rmtree(self._of_step(step))

    @contextmanager
    def _unfinished(self, global_step: int) -> Iterator[Path]:
        draft = self._path / f".unfinished-{os.getpid()}-{global_step}"
        draft.mkdir()
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _remove_unfinished(self) -> None:
        for draft in self._path.glob(".unfinished-*"):  # of a process that was killed
            shutil.rmtree(draft, ignore_errors=True)

    def _steps(self) -> list[int]:
        found = (_NAME.fullmatch(entry.name) for entry in self._path.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def _of_step(self, global_step: int) -> Path:
        return self._path / f"checkpoint-{global_step}"


def _flush(file: Path) -> None:
    """Have the disk hold what was written, so that a machine that loses its power finds all of it or none."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
