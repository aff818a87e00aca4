from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manyhands.averaging.state.ancestry import extended
from manyhands.base.errors import ConfigError
from manyhands.base.parameter_spec import ParameterSpec
from manyhands.checkpoints.checkpoint_dir import ABOUT, CheckpointDir, Place, export_model, faults_in, newest_checkpoint
from manyhands.optim.manifest import RunManifest

RUN = RunManifest(
    protocol="manyhands/1", run_id="run", target_batch_size=64, tensors=[ParameterSpec("weight", (4, 2), "float32")],
    frozen=[], optimizer="AdamW", hyper_parameters=[{"lr": 0.01, "betas": (0.9, 0.99), "bound": float("inf")}],
    scheduler="", codec="none", extra={"tokenizer": "abc"},
)  # fmt: skip


def add(folder: CheckpointDir, step: int, text: str = "values") -> None:
    with folder.adding(step, RUN) as draft:
        (draft / "model").write_text(text)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def steps(folder: CheckpointDir) -> list[int]:
    return [checkpoint.global_step for checkpoint in folder.newest(RUN)]


def change(path: Path, **values: Any) -> None:
    """Change the description of a checkpoint."""
    about = msgspec.json.decode((path / ABOUT).read_bytes())
    (path / ABOUT).write_bytes(msgspec.json.encode({**about, **values}))


def test_the_two_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder"
    folder = CheckpointDir(path, "run")
    assert folder.newest_path() is None
    assert steps(folder) == []
    for step in (8, 9, 10, 100):
        add(folder, step)
    assert names(path) == ["checkpoint-10", "checkpoint-100"]
    assert steps(folder) == [100, 10]
    newest = next(folder.newest(RUN))
    assert (newest.path / "model").read_text() == "values"
    assert folder.newest_file("model") == b"values"
    assert folder.newest_file("unknown") is None
    assert folder.newest_run() is not None


def test_a_checkpoint_whose_writing_breaks_off_is_not_there(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path, "run")
    add(folder, 1)
    with contextlib.suppress(OSError), folder.adding(2, RUN) as draft:
        (draft / "model").write_text("half")
        raise OSError("the disk is full")
    assert names(tmp_path) == ["checkpoint-1"]
    folder.close()
    (tmp_path / ".unfinished-4711-3").mkdir()  # of a process that was killed
    CheckpointDir(tmp_path, "run")
    assert names(tmp_path) == ["checkpoint-1"]


def test_a_checkpoint_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path, "run")
    add(folder, 1, "old")
    add(folder, 1, "new")
    assert names(tmp_path) == ["checkpoint-1"]
    assert (tmp_path / "checkpoint-1" / "model").read_text() == "new"


def test_folders_and_files_that_are_no_checkpoints_stay(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").write_text("a file")
    (tmp_path / "checkpoint-best").mkdir()
    folder = CheckpointDir(tmp_path, "run")
    for step in (1, 2, 3):
        add(folder, step)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-best"]
    assert (tmp_path / "checkpoint-7").read_text() == "a file"


def test_an_earlier_step_deletes_no_later_checkpoint(tmp_path: Path) -> None:
    """As when a loop is started again without resume()."""
    folder = CheckpointDir(tmp_path, "run")
    for step in (500, 600, 100, 200, 300):
        add(folder, step)
    assert steps(folder) == [600, 500, 300, 200]


def place_at(branch: str) -> Place:
    """The place after some steps, each named by a letter."""
    lineages, ancestry = [hashlib.sha256(branch[: end + 1].encode()).digest() for end in range(len(branch))], b""
    for lineage in lineages:
        ancestry = extended(ancestry, lineage)
    return Place.of({"step": len(branch), "lineage": lineages[-1].hex(), "ancestry": ancestry.hex()})


@pytest.mark.parametrize(("one", "other"), [("aaa", "bbbb"), ("abb", "accc")], ids=["begun anew", "parted later"])
def test_checkpoints_of_another_branch_are_set_aside_and_neither_counted_nor_replaced(
    one: str, other: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointDir(tmp_path, "run")

    def add_up_to(branch: str) -> None:
        for step in range(max(2, len(branch) - 1), len(branch) + 1):
            with folder.adding(step, RUN, place_at(branch[:step])) as draft:
                (draft / "model").write_text(branch[:step])

    def models(path: Path) -> list[str]:
        return [(path / name / "model").read_text() for name in names(path) if name.startswith("checkpoint")]

    def folder_of(branch: str) -> str:
        return f"other-{place_at(branch).lineage[:12]}"

    again = one + one[-1] * 2
    for branch in (one, other, again):
        add_up_to(branch)
    assert models(tmp_path) == [again[:4], again]
    assert names(tmp_path) == sorted(["checkpoint-4", "checkpoint-5", folder_of(one), folder_of(other)])
    assert models(tmp_path / folder_of(one)) == [one[:2], one]
    assert models(tmp_path / folder_of(other)) == [other[:3], other]
    why = "the run was begun anew" if one[0] != other[0] else "the other peers continued on another branch of the run"
    assert [why in record.getMessage() for record in caplog.records] == [True, True]
    folder.close()
    with contextlib.closing(CheckpointDir(tmp_path / folder_of(one), "run")) as kept:
        assert steps(kept) == [3, 2], "a trainer can continue from there"


def test_checkpoints_that_are_set_aside_twice_at_one_step_are_both_kept(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path, "run")
    for branch in ("a", "b", "a", "b"):
        with folder.adding(1, RUN, place_at(branch)):
            pass
    assert len(names(tmp_path)) == 4


def test_checkpoints_of_a_peer_that_missed_steps_are_of_the_same_branch(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path, "run", num_kept=1)
    for step in (1, 4, 9):
        with folder.adding(step, RUN, place_at("x" * step)):
            pass
    assert names(tmp_path) == ["checkpoint-9"]


def shorter(file: Path) -> str:
    file.write_bytes(file.read_bytes()[:-4])
    return "has 2 bytes instead of 6"


def altered(file: Path) -> str:
    file.write_bytes(file.read_bytes()[:-4] + b"####")
    return "was altered: it has another SHA-256"


def missing(file: Path) -> str:
    file.unlink()
    return "is missing"


@pytest.mark.parametrize("damage", [shorter, altered, missing])
@pytest.mark.parametrize("name", ["model", ABOUT])
def test_a_damaged_checkpoint_is_named_with_its_reason_and_the_one_before_it_is_used(
    tmp_path: Path, name: str, damage: Callable[[Path], str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointDir(tmp_path, "run")
    add(folder, 1)
    add(folder, 2)
    reason = damage(tmp_path / "checkpoint-2" / name)
    if name == ABOUT:
        reason = "cannot be read: "
    assert steps(folder) == [1]
    assert f"checkpoint-2 is damaged ({name} {reason}" in caplog.text
    assert "; it is not used" in caplog.text
    assert faults_in(tmp_path / "checkpoint-2")[name].startswith(reason)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    assert folder.newest_file("model") == b"values"
    damage(tmp_path / "checkpoint-1" / name)
    assert steps(folder) == []
    with pytest.raises(ConfigError, match="there is no intact checkpoint in"):
        newest_checkpoint(tmp_path)


def test_a_file_is_looked_for_in_the_checkpoint_alone(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path, "run")
    add(folder, 1)
    (tmp_path / "secret").write_text("values")
    saved = msgspec.json.decode((tmp_path / "checkpoint-1" / ABOUT).read_bytes())["files"]["model"]
    for name in ("../secret", str(tmp_path / "secret")):
        change(tmp_path / "checkpoint-1", files={name: saved})
        assert "is outside the checkpoint" in faults_in(tmp_path / "checkpoint-1")[ABOUT]
        with pytest.raises(msgspec.ValidationError, match="is outside the checkpoint"):
            export_model(tmp_path / "checkpoint-1", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"hyper_parameters": [{**RUN.hyper_parameters[0], "lr": 1.0}]},
            "learning_rate is 1.0 here, 0.01 in the checkpoint",
        ),
        ({"target_batch_size": 32}, "target_batch_size is 32 here, 64 in the checkpoint"),
        ({"optimizer": "SGD"}, "optimizer is 'SGD' here, 'AdamW' in the checkpoint"),
        ({"extra": {"tokenizer": "xyz"}}, "tokenizer is xyz here, abc in the checkpoint"),
        ({"extra": {"tokenizer": "abc", "layers": "4"}}, "layers is 4 here, not set in the checkpoint"),
        (
            {"tensors": [ParameterSpec("weight", (4, 3), "float32")]},
            r"tensor weight has shape \[4, 3\] here, \[4, 2\] in the checkpoint",
        ),
    ],
)
def test_another_model_or_setting_is_named_with_both_values(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    folder = CheckpointDir(tmp_path, "run")
    add(folder, 1)
    with pytest.raises(ConfigError, match=rf"checkpoint-1 was made with other settings: {says}\. Give the same ones"):
        next(folder.newest(msgspec.structs.replace(RUN, **changes)))


def test_protocol_codec_and_new_options_of_a_checkpoint_may_differ(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path, "run")
    add(folder, 1)
    groups = [{**RUN.hyper_parameters[0], "an option of a newer torch": True}]
    newer = msgspec.structs.replace(RUN, protocol="manyhands/2", codec="int8", hyper_parameters=groups)
    assert next(folder.newest(newer)).global_step == 1


@pytest.mark.parametrize("there", [0, 1, 3])
def test_another_format_is_refused_with_both_numbers(tmp_path: Path, there: int) -> None:
    """Format 1 had states without the roster."""
    folder = CheckpointDir(tmp_path, "run")
    add(folder, 1)
    add(folder, 2)
    change(tmp_path / "checkpoint-2", format=there)
    says = f"checkpoint-2 has format {there}, and this version reads format 2; .*"
    with pytest.raises(ConfigError, match=says):
        next(folder.newest(RUN))
    folder.close()
    with pytest.raises(ConfigError, match=says):
        CheckpointDir(tmp_path, "run")


def test_a_checkpoint_folder_in_use_or_of_another_run_is_refused(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path, "run")
    with pytest.raises(ConfigError, match="in use by another peer"):
        CheckpointDir(tmp_path, "run")
    add(folder, 1)
    folder.close()
    with pytest.raises(ConfigError, match=r"checkpoint-1 is of run 'run', and this is 'other'"):
        CheckpointDir(tmp_path, "other")
    CheckpointDir(tmp_path, "run").close()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        CheckpointDir(file, "run")
    with pytest.raises(ConfigError, match="Not a directory; name a folder that can be written"):
        CheckpointDir(file / "below", "run")
    with pytest.raises(ConfigError, match="0 checkpoints cannot be kept"):
        CheckpointDir(tmp_path, "run", num_kept=0)


# power failures


class PowerFails(BaseException):
    """Nothing runs after it: what would clean up fails too."""


@dataclasses.dataclass
class Disk:
    """Fails before the ``fails_at``-th change to the disk, and loses what was not flushed by then.

    Attributes:
        renames: since their folder was flushed, as (source, target).
    """

    fails_at: int
    num_changes: int = 0
    flushed: set[int] = dataclasses.field(default_factory=set)
    renames: list[tuple[Path, Path]] = dataclasses.field(default_factory=list)

    def change(self) -> None:
        self.num_changes += 1
        if self.num_changes >= self.fails_at:
            raise PowerFails

    @contextlib.contextmanager
    def plugged_in(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("mkdir", "rmdir", "unlink", "remove"):
                patch.setattr(os, name, self._failing(getattr(os, name)))
            patch.setattr(os, "fsync", self._fsync)
            patch.setattr(Path, "replace", lambda source, target: self._replace(source, target))
            patch.setattr(Path, "write_bytes", lambda path, content: self._write(path, content))
            yield

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def changing(*args: Any, **options: Any) -> Any:
            self.change()
            return call(*args, **options)

        return changing

    def _fsync(self, descriptor: int) -> None:
        self.change()
        inode = os.fstat(descriptor).st_ino
        self.flushed.add(inode)
        self.renames = [(old, new) for old, new in self.renames if new.parent.stat().st_ino != inode]

    def _replace(self, source: Path, target: Path) -> None:
        self.change()
        os.rename(source, target)  # noqa: PTH104 (Path.replace is this)
        self.renames.append((source, target))

    def _write(self, path: Path, content: bytes) -> int:
        for part in (content[:5], content):  # a file may be torn
            self.change()
            with path.open("wb") as file:
                file.write(part)
            self.flushed.discard(path.stat().st_ino)
        return len(content)

    def lose(self, folder: Path, *, renames_too: bool) -> None:
        """Lose the content of files, and perhaps the new names, that were not flushed."""
        if renames_too:
            for source, target in reversed(self.renames):
                if target.exists():  # else it was removed since then
                    target.rename(source)
        for file in folder.rglob("*"):
            if file.is_file() and file.name != "lock" and file.stat().st_ino not in self.flushed:
                file.write_bytes(b"")


@pytest.mark.parametrize("renames_too", [False, True])
@pytest.mark.parametrize(("before", "after", "kept"), [(1, 2, 2), (1, 2, 1), (2, 2, 1)])
def test_after_a_power_failure_at_any_change_there_is_a_whole_checkpoint(
    tmp_path: Path, before: int, after: int, kept: int, renames_too: bool
) -> None:
    """The old or the new one: with more of them, with one alone, and when a step is saved again."""
    seen: list[str] = []
    for fails_at in range(1, 1000):
        path = tmp_path / f"{fails_at}"
        disk, is_done = Disk(10**6), False
        with (
            contextlib.closing(CheckpointDir(path, "run", kept)) as folder,
            disk.plugged_in(),
            folder.adding(before, RUN) as draft,
        ):
            (draft / "model").write_bytes(b"old values")
            (draft / "optimizer").write_bytes(b"old state")
        disk.num_changes, disk.fails_at = 0, fails_at
        with contextlib.suppress(PowerFails), contextlib.closing(CheckpointDir(path, "run", kept)) as folder:
            with disk.plugged_in(), folder.adding(after, RUN) as draft:
                (draft / "model").write_bytes(b"new values")
                (draft / "optimizer").write_bytes(b"new state")
            is_done = True
        disk.lose(path, renames_too=renames_too)
        with contextlib.closing(CheckpointDir(path, "run", kept)) as folder:
            newest = next(folder.newest(RUN), None)
            assert newest is not None, f"nothing is left after change {fails_at}"
            age = {(b"old values", b"old state"): "old", (b"new values", b"new state"): "new"}
            seen.append(age[(newest.path / "model").read_bytes(), (newest.path / "optimizer").read_bytes()])
            with folder.adding(after + 1, RUN) as draft:  # and the next one can be saved
                (draft / "model").write_bytes(b"newer values")
            assert steps(folder)[0] == after + 1
            assert not list(path.glob(".*")), "nothing is left over"
        shutil.rmtree(path)
        if is_done:
            break
    assert is_done
    assert len(seen) > 10
    assert seen == sorted(seen, reverse=True), "first the old one, then the new one"
    assert seen[-1] == "new"
