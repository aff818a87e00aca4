from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.checkpoint_dir import CheckpointDir


def add(folder: CheckpointDir, step: int, text: str = "values") -> None:
    with folder.adding(step, f"digest {step}") as draft:
        (draft / "model").write_text(text)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def test_the_two_newest_are_kept(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path / "new" / "folder", "run")
    assert folder.newest() is None
    for step in (8, 9, 10, 100):
        add(folder, step)
    assert names(tmp_path / "new" / "folder") == ["checkpoint-10", "checkpoint-100"]
    newest = folder.newest()
    assert newest is not None
    assert (newest.about.run_id, newest.about.global_step, newest.about.state_digest) == ("run", 100, "digest 100")
    assert (newest.path / "model").read_text() == "values"


def test_what_breaks_off_is_not_there(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path, "run")
    add(folder, 1)
    with contextlib.suppress(OSError), folder.adding(2, "") as draft:
        (draft / "model").write_text("half")
        raise OSError("the disk is full")
    assert names(tmp_path) == ["checkpoint-1"]
    folder.close()
    (tmp_path / ".unfinished-4711-3").mkdir()  # of a process that was killed
    CheckpointDir(tmp_path, "run")
    assert names(tmp_path) == ["checkpoint-1"]


def test_one_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path, "run")
    add(folder, 1, "old")
    add(folder, 1, "new")
    assert (tmp_path / "checkpoint-1" / "model").read_text() == "new"


def test_other_folders_and_files_stay(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").write_text("a file")
    (tmp_path / "checkpoint-best").mkdir()
    folder = CheckpointDir(tmp_path, "run")
    for step in (1, 2, 3):
        add(folder, step)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-best"]
    assert (tmp_path / "checkpoint-7").read_text() == "a file"


def test_what_is_not_this_runs_is_refused(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path, "run")
    with pytest.raises(ConfigError, match="in use by another trainer"):
        CheckpointDir(tmp_path, "run")
    add(folder, 1)
    folder.close()
    with pytest.raises(ConfigError, match=r"checkpoint-1 is of run 'run', and this is 'other'"):
        CheckpointDir(tmp_path, "other")
    CheckpointDir(tmp_path, "run").close()
    (tmp_path / "checkpoint-1" / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"checkpoint-1 cannot be read .* remove it to go on"):
        CheckpointDir(tmp_path, "run")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        CheckpointDir(file, "run")
    with pytest.raises(ConfigError, match="Not a directory; name a folder that can be written"):
        CheckpointDir(file / "below", "run")
