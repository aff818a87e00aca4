"""The folder with the checkpoints of one run. Imports no torch: it is checked before anything is started.

::

    FOLDER/lock                   locked by the process that uses the folder
    FOLDER/checkpoint-STEP/       the newest few
        run.json                  format, step, settings of the run; size and SHA-256 of each other file
        model.safetensors ...     the model, its config if it is of transformers, and the tokenizer
        optimizer.safetensors     tensors of the optimizer
        optimizer.json            its other values, and the position in the run
    FOLDER/other-LINEAGE/         checkpoints of another branch of the run, which are never removed; see below
    FOLDER/.unfinished-...        being written or removed, or left by a killed process
    FOLDER/.replaced-...          a checkpoint, while one of the same step takes its place

A run has several branches if it was begun anew under the same name, or if its peers were cut off from each other and
trained on separately. A model on one branch has learnt nothing from another branch, even if its step is higher.
LINEAGE is that of the checkpoint of the highest step.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from manyhands.averaging.state.ancestry import descends_from, root_of
from manyhands.base.digests import sha256_of
from manyhands.base.errors import ConfigError
from manyhands.base.folder_lock import FolderLock
from manyhands.optim.manifest import RunManifest, differences

logger = logging.getLogger(__name__)

FORMAT = 2
"""Goes up when an older version could not load a checkpoint, or would load it wrongly."""
SAVED_EVERY = 100
"""Global steps from one checkpoint to the next, by default."""
ABOUT = "run.json"
OPTIMIZER_TENSORS = "optimizer.safetensors"
OPTIMIZER_VALUES = "optimizer.json"

_NAME = re.compile(r"checkpoint-(\d{1,18})")
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"
_OTHER = "other-"
_LINEAGE_DIGITS = 12


class SavedFile(msgspec.Struct, frozen=True):
    """A file as it was saved; the SHA-256 is in hexadecimal."""

    bytes: int
    sha256: str


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a state in its run. All digests are in hexadecimal, and empty if unknown.

    Attributes:
        lineage: digest of its step.
        root: digest of the run's beginning; another one if the run was begun anew.
        ancestry: the steps that led there (:mod:`manyhands.averaging.state.ancestry`); not stored.
    """

    step: int = 0
    lineage: str = ""
    root: str = ""
    ancestry: str = ""

    @classmethod
    def of(cls, place: Mapping[str, Any]) -> Place:
        """Read it from the state of an optimizer."""
        ancestry = place["ancestry"]
        root = root_of(bytes.fromhex(ancestry)).hex()
        return cls(step=place["step"], lineage=place["lineage"], root=root, ancestry=ancestry)

    def goes_on_from(self, earlier: Place) -> bool:
        """Whether this state continues from an earlier one. True also if that can no longer be known."""
        root = bytes.fromhex(earlier.root)
        lineage = bytes.fromhex(earlier.lineage)
        return descends_from(bytes.fromhex(self.ancestry), self.step, earlier.step, root, lineage)


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a checkpoint, stored with it.

    Attributes:
        run: the settings of the run.
        place: where it is in the run.
        files: by path below the checkpoint, with ``/``.
    """

    format: int = FORMAT
    global_step: int
    run: RunManifest
    files: dict[str, SavedFile]
    place: Place = Place()

    def __post_init__(self) -> None:
        for name in self.files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"file {name!r} is outside the checkpoint")


class _Head(msgspec.Struct):
    """The part of a description that all formats have."""

    format: int = 0


class Checkpoint(NamedTuple):
    """A checkpoint whose files are as they were saved."""

    path: Path
    global_step: int


class CheckpointDir:
    """Finds, adds and removes checkpoints: folders ``checkpoint-STEP``, as the trainers of other libraries name them.

    The folder is locked by this process until :meth:`close`.

    Args:
        num_kept: number of checkpoints to keep; with more than one, a damaged one can be replaced by an older one.
    Attributes:
        is_new: whether this object created the folder.
    Raises:
        FolderInUse: another process uses the folder.
        ConfigError: the folder cannot be used, or its checkpoints are another run's, or of another format.
    """

    def __init__(self, path: Path, run_id: str, num_kept: int = 2) -> None:
        if num_kept < 1:
            raise ConfigError(f"{num_kept} checkpoints cannot be kept; keep at least 1, for example 2")
        self.path = path
        self._num_kept = num_kept
        self._lock = FolderLock(path, "checkpoint folder")
        self.is_new = self._lock.is_new
        try:
            self._tidy()
            self._check_run(run_id)
        except OSError as error:
            self.close()
            raise ConfigError(f"checkpoint folder {path}: {error.strerror}; name one that can be written") from error
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the folder. May be called twice."""
        self._lock.release()

    def newest(self, run: RunManifest) -> Iterator[Checkpoint]:
        """Intact checkpoints, the highest global step first; a warning is logged for each damaged one.

        Raises:
            ConfigError: a checkpoint was made with other settings than ``run``; names both.
        """
        for step in reversed(_steps_in(self.path)):
            path = self.of_step(step)
            about = _read_intact(path)
            if about is None:
                continue
            if lines := _differences(run, about.run):
                raise ConfigError(
                    f"checkpoint {path} was made with other settings: {'; '.join(lines)}. Give the same ones, or "
                    "another checkpoint folder"
                )
            yield Checkpoint(path, step)

    def newest_run(self) -> RunManifest | None:
        """The settings in the newest checkpoint with a readable description."""
        for step in reversed(_steps_in(self.path)):
            with suppress(OSError, msgspec.MsgspecError):
                return read_checkpoint_info(self.of_step(step)).run
        return None

    def newest_file(self, name: str) -> bytes | None:
        """The content of a file, from the newest checkpoint in which it is undamaged; None without one."""
        for step in reversed(_steps_in(self.path)):
            path = self.of_step(step)
            with suppress(OSError, msgspec.MsgspecError):
                saved = read_checkpoint_info(path).files.get(name)
                if saved is not None and not _fault_of(path / name, saved):
                    return (path / name).read_bytes()
        return None

    def newest_path(self) -> Path | None:
        """The newest checkpoint, intact or not."""
        steps = _steps_in(self.path)
        return self.of_step(steps[-1]) if steps else None

    def newest_step(self) -> int:
        """The global step of the newest checkpoint, intact or not; 0 without any."""
        return max(_steps_in(self.path), default=0)

    def of_step(self, global_step: int) -> Path:
        """The path of the checkpoint of a step, whether it exists or not."""
        return self.path / f"checkpoint-{global_step}"

    def of_other_branches(self, here: Place) -> list[tuple[Path, Place]]:
        """The checkpoints that are on other branches than a state, newest first, without those that are damaged."""
        found: list[tuple[Path, Place]] = []
        for step in reversed(_steps_in(self.path)):
            with suppress(OSError, msgspec.MsgspecError):
                place = read_checkpoint_info(self.of_step(step)).place
                if not here.goes_on_from(place):
                    found.append((self.of_step(step), place))
        return found

    @contextmanager
    def adding(self, global_step: int, run: RunManifest, place: Place | None = None) -> Iterator[Path]:
        """Yield a folder to write a checkpoint into; the checkpoint counts once the block ends without an error.

        Checkpoints of other branches of the run are moved to a folder of their own first.

        Args:
            place: of the state that is saved.
        """
        place = place if place is not None else Place(step=global_step)
        self._set_others_aside(place)
        with written_whole(self.of_step(global_step)) as draft:
            yield draft
            files = {
                file.relative_to(draft).as_posix(): SavedFile(file.stat().st_size, sha256_of(file))
                for file in sorted(draft.rglob("*"))
                if file.is_file()
            }
            stored = msgspec.structs.replace(place, ancestry="")
            about = CheckpointInfo(global_step=global_step, run=run, files=files, place=stored)
            (draft / ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")
        # checkpoints of later steps do not count: they are damaged, or this start did not resume from them
        for step in [step for step in _steps_in(self.path) if step <= global_step][: -self._num_kept]:
            self._remove(self.of_step(step))

    def _set_others_aside(self, here: Place) -> None:
        others = self.of_other_branches(here)
        if not others:
            return
        newest = others[0][1]
        to = self.path / f"{_OTHER}{newest.lineage[:_LINEAGE_DIGITS] or 'unknown'}"
        while any((to / path.name).exists() for path, _ in others):  # set aside before, at the same step
            to = to.with_name(f"{to.name}-")
        to.mkdir(exist_ok=True)
        for path, _ in others:
            path.replace(to / path.name)
        logger.warning(
            "The model that is trained now does not continue from %s: %s. The old checkpoints were moved to %s, where "
            "none is removed. To continue from them instead, end all trainers, and start one with that folder as its "
            "checkpoint folder", " and ".join(path.name for path, _ in others), parted(here, newest), to,
        )  # fmt: skip

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint, so that readers see all of it or nothing."""
        trash = path.with_name(f"{_UNFINISHED}{path.name}")
        with suppress(OSError):
            path.replace(trash)
        shutil.rmtree(trash, ignore_errors=True)

    def _tidy(self) -> None:
        """Undo what a killed process has left, and check that the folder can be written."""
        for draft in self.path.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(draft, ignore_errors=True)
        for replaced in self.path.glob(f"{_REPLACED}*"):
            _put_back(replaced, self.path / replaced.name.removeprefix(_REPLACED))
        probe = self.path / f"{_UNFINISHED}{os.getpid()}"
        probe.mkdir()
        probe.rmdir()

    def _check_run(self, run_id: str) -> None:
        for step in reversed(_steps_in(self.path)):
            with suppress(OSError, msgspec.MsgspecError):
                about = read_checkpoint_info(self.of_step(step))
                if about.run.run_id != run_id:
                    raise ConfigError(
                        f"checkpoint {self.of_step(step)} is of run {about.run.run_id!r}, and this is {run_id!r}; "
                        "give each run a checkpoint folder of its own"
                    )


def parted(here: Place, there: Place) -> str:
    """Explain why a checkpoint at ``there`` is on another branch than the state at ``here``."""
    is_anew = here.root != there.root
    return "the run was begun anew" if is_anew else "the other peers continued on another branch of the run"


# functions that take no lock: a trainer may be using the folder


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first; the folder itself if it is one.

    Raises:
        ConfigError: there is none.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; name the checkpoint folder of a trainer, for example manyhands-RUN_ID"
        )
    if (folder / ABOUT).exists():
        return [folder]
    paths = [folder / f"checkpoint-{step}" for step in reversed(_steps_in(folder))]
    if not paths:
        if below := sorted(folder.glob(f"*/checkpoint-*/{ABOUT}")):
            raise ConfigError(f"there is no checkpoint in {folder} itself; name a folder in it: {below[0].parents[1]}")
        raise ConfigError(
            f"there is no checkpoint in {folder}; a trainer saves one every {SAVED_EVERY} global steps "
            "(--checkpoint-every), and when it ends, also after Ctrl-C"
        )
    return paths


def newest_checkpoint(folder: Path) -> Path:
    """The newest intact checkpoint of :func:`checkpoints_in`; a warning is logged for each damaged one.

    Raises:
        ConfigError: there is none.
    """
    for path in checkpoints_in(folder):
        if _read_intact(path) is not None:
            return path
    raise ConfigError(f"there is no intact checkpoint in {folder}; see: manyhands checkpoint verify {folder}")


def read_checkpoint_info(path: Path) -> CheckpointInfo:
    """The description of a checkpoint.

    Raises:
        ConfigError: it has a format that this version does not read; names both.
        OSError, msgspec.MsgspecError: it cannot be read.
    """
    raw = (path / ABOUT).read_bytes()
    found = msgspec.json.decode(raw, type=_Head).format
    if found != FORMAT:
        update = "update manyhands, or " if found > FORMAT else ""
        raise ConfigError(
            f"checkpoint {path} has format {found}, and this version reads format {FORMAT}; {update}give another "
            "checkpoint folder"
        )
    return msgspec.json.decode(raw, type=CheckpointInfo)


def faults_in(path: Path) -> dict[str, str]:
    """Each file of a checkpoint, with the reason why it is not as it was saved, or an empty string.

    Raises:
        ConfigError: as :func:`read_checkpoint_info`.
    """
    try:
        about = read_checkpoint_info(path)
    except (OSError, msgspec.MsgspecError) as error:
        return {ABOUT: f"cannot be read: {error}"}
    return {ABOUT: "", **{name: _fault_of(path / name, saved) for name, saved in about.files.items()}}


def export_model(path: Path, to: Path) -> None:
    """Copy the files of the model, with its tokenizer, from an intact checkpoint to a new folder.

    Raises:
        ConfigError: the folder exists.
    """
    if to.exists():
        raise ConfigError(f"{to} is there already; name a folder that does not exist yet")
    to.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(to) as draft:
        for name in read_checkpoint_info(path).files:
            if name not in (OPTIMIZER_TENSORS, OPTIMIZER_VALUES):
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path / name, draft / name)


# parts


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a folder to write into, which is renamed to ``path`` if the block ends without an error.

    Everything is on disk before it gets its name. If ``path`` is there already, it is replaced.
    """
    draft = path.with_name(f"{_UNFINISHED}{os.getpid()}-{path.name}")
    replaced = path.with_name(f"{_REPLACED}{path.name}")
    draft.mkdir()
    try:
        yield draft
        for entry in (*draft.rglob("*"), draft):
            _flush(entry)
        if path.exists():
            path.replace(replaced)
        draft.replace(path)
        _flush(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if replaced.exists():
            _put_back(replaced, path)


def _put_back(replaced: Path, path: Path) -> None:
    """Finish or undo the replacement of a folder."""
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        replaced.replace(path)


def _steps_in(folder: Path) -> list[int]:
    entries = folder.iterdir() if folder.is_dir() else ()  # it may have been removed since
    found = (_NAME.fullmatch(entry.name) for entry in entries if entry.is_dir())
    return sorted(int(match[1]) for match in found if match)


def _read_intact(path: Path) -> CheckpointInfo | None:
    """The description of a checkpoint; None, with a warning, if it is damaged."""
    faults = [f"{name} {fault}" for name, fault in faults_in(path).items() if fault]
    if faults:
        logger.warning("Checkpoint %s is damaged (%s); it is not used", path, ", ".join(faults))
        return None
    return read_checkpoint_info(path)


def _fault_of(file: Path, saved: SavedFile) -> str:
    try:
        if (size := file.stat().st_size) != saved.bytes:
            return f"has {size} bytes instead of {saved.bytes}"
        return "" if sha256_of(file) == saved.sha256 else "was altered: it has another SHA-256"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _differences(here: RunManifest, there: RunManifest) -> list[str]:
    """The settings that differ from those of a checkpoint, one line each. Protocol and codec are not compared."""
    here = msgspec.json.decode(msgspec.json.encode(here), type=RunManifest)  # the same types as read from JSON
    groups: list[dict[str, Any]] = there.hyper_parameters
    if len(groups) == len(here.hyper_parameters):  # a newer torch may have more options
        groups = [{**own, **group} for own, group in zip(here.hyper_parameters, groups, strict=True)]
    there = msgspec.structs.replace(there, protocol=here.protocol, codec=here.codec, hyper_parameters=groups)
    return [line.replace("in the run", "in the checkpoint") for line in differences(here, there)]


def _flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
