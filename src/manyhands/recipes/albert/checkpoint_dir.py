"""The folder with the checkpoints of one run. Imports no torch: it is checked before anything is started."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from manyhands.base.digests import sha256_of
from manyhands.base.errors import ConfigError
from manyhands.base.folder_lock import FolderLock

logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d{1,18})")
_ABOUT = "run.json"
_TOKENIZER = "tokenizer.json"


class About(msgspec.Struct, frozen=True):
    """Description of a checkpoint, stored with it.

    Attributes:
        facts: settings that must be the same when it is loaded.
        files: SHA-256 of each, in hexadecimal.
    """

    run_id: str
    global_step: int
    facts: dict[str, str]
    files: dict[str, str]


class Checkpoint(NamedTuple):
    """A checkpoint whose files match their digests."""

    path: Path
    global_step: int


class CheckpointDir:
    """Finds, adds and removes checkpoints: folders ``checkpoint-STEP``, as the trainers of other libraries name them.

    The folder is locked by this process until :meth:`close`.

    Args:
        num_kept: number of checkpoints to keep; with more than one, a damaged one can be replaced by an older one.
    Raises:
        FolderInUse: another process uses the folder.
        ConfigError: the folder cannot be used, or its checkpoints are another run's.
    """

    def __init__(self, path: Path, run_id: str, num_kept: int = 2) -> None:
        self.path = path
        self._run_id = run_id
        self._num_kept = num_kept
        self._lock = FolderLock(path, "checkpoint_dir")
        try:
            self._remove_unfinished()
            with self._unfinished(0):
                pass
            self._check_run()
        except OSError as error:
            self.close()
            raise ConfigError(f"checkpoint_dir {path}: {error.strerror}; name a folder that can be written") from error
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the folder. May be called twice."""
        self._lock.release()

    def newest(self, facts: Mapping[str, str]) -> Iterator[Checkpoint]:
        """Readable checkpoints, the highest global step first; a warning is logged for each unreadable one.

        Raises:
            ConfigError: a checkpoint was made with other settings; names them.
        """
        for step in reversed(self._steps()):
            path = self._of_step(step)
            about = _read_whole(path)
            if about is None:
                continue
            if differences := _differences(about.facts, facts):
                raise ConfigError(
                    f"checkpoint {path} was made with other settings: {'; '.join(differences)}. "
                    "Give the same ones, or another checkpoint_dir"
                )
            yield Checkpoint(path, step)

    def newest_facts(self) -> Mapping[str, str]:
        """The settings of the newest checkpoint with a readable description; empty without one."""
        for step in reversed(self._steps()):
            with suppress(OSError, msgspec.MsgspecError):
                return _read(self._of_step(step)).facts
        return {}

    def newest_tokenizer(self) -> str | None:
        """The tokenizer of the newest checkpoint, as JSON, if its file is intact; else None."""
        for step in reversed(self._steps()):
            path = self._of_step(step)
            with suppress(OSError, msgspec.MsgspecError, ValueError):
                if _read(path).files.get(_TOKENIZER) == sha256_of(path / _TOKENIZER):
                    return (path / _TOKENIZER).read_text(encoding="utf-8")
        return None

    def newest_path(self) -> Path | None:
        """The newest checkpoint, readable or not."""
        steps = self._steps()
        return self._of_step(steps[-1]) if steps else None

    def has_any(self) -> bool:
        """Whether there is a checkpoint, readable or not."""
        return bool(self._steps())

    @contextmanager
    def adding(self, global_step: int, facts: Mapping[str, str]) -> Iterator[Path]:
        """Yield a folder to write a checkpoint into; the checkpoint counts once the block ends without an error."""
        with self._unfinished(global_step) as draft:
            yield draft
            files = {file.name: sha256_of(file) for file in sorted(draft.iterdir())}
            about = About(self._run_id, global_step, dict(facts), files)
            (draft / _ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")
            for entry in (*draft.iterdir(), draft):
                _flush(entry)
            path = self._of_step(global_step)
            if path.exists():
                shutil.rmtree(path)
            draft.replace(path)
            _flush(self.path)
        for step in self._steps()[: -self._num_kept]:
            shutil.rmtree(self._of_step(step), ignore_errors=True)

    def _check_run(self) -> None:
        for step in reversed(self._steps()):
            with suppress(OSError, msgspec.MsgspecError):
                about = _read(self._of_step(step))
                if about.run_id != self._run_id:
                    raise ConfigError(
                        f"checkpoint {self._of_step(step)} is of run {about.run_id!r}, and this is {self._run_id!r}; "
                        "give each run a checkpoint_dir of its own"
                    )

    @contextmanager
    def _unfinished(self, global_step: int) -> Iterator[Path]:
        draft = self.path / f".unfinished-{os.getpid()}-{global_step}"
        draft.mkdir()
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _remove_unfinished(self) -> None:
        for draft in self.path.glob(".unfinished-*"):  # left by a killed process
            shutil.rmtree(draft, ignore_errors=True)

    def _steps(self) -> list[int]:
        return _steps_in(self.path)

    def _of_step(self, global_step: int) -> Path:
        return self.path / f"checkpoint-{global_step}"


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest intact checkpoint in a folder; a warning is logged for each damaged one.

    Takes no lock, so a trainer may be using the folder.
    """
    paths = (folder / f"checkpoint-{step}" for step in reversed(_steps_in(folder)))
    return next((path for path in paths if _read_whole(path) is not None), None)


def _steps_in(folder: Path) -> list[int]:
    found = (_NAME.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in found if match)


def _read_whole(path: Path) -> About | None:
    """The description of a checkpoint; None, with a warning, if it is damaged."""
    try:
        about = _read(path)
        damaged = [name for name, digest in about.files.items() if sha256_of(path / name) != digest]
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("checkpoint %s cannot be read (%s); it is not used", path, error)
        return None
    if damaged:
        logger.warning("checkpoint %s is damaged (%s); it is not used", path, ", ".join(damaged))
        return None
    return about


def _read(path: Path) -> About:
    return msgspec.json.decode((path / _ABOUT).read_bytes(), type=About)


def _differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    names = dict.fromkeys([*there, *here])
    return [
        f"{name} {there.get(name, 'unknown')} there, {here.get(name, 'unknown')} here"
        for name in names
        if there.get(name) != here.get(name)
    ]


def _flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk, so that after a power loss there is all of it or nothing."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
