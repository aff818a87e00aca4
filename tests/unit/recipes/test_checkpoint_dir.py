from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.checkpoint_dir import CheckpointDir

FACTS = {"tokenizer": "abc", "learning_rate": "0.01"}


def add(folder: CheckpointDir, step: int, text: str = "values") -> None:
    with folder.adding(step, FACTS) as draft:
        (draft / "model").write_text(text)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def steps(folder: CheckpointDir) -> list[int]:
    return [checkpoint.global_step for checkpoint in folder.newest(FACTS)]


def test_the_two_newest_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder"
    folder = CheckpointDir(path, "run")
    assert not folder.has_any()
    assert steps(folder) == []
    for step in (8, 9, 10, 100):
        add(folder, step)
    assert names(path) == ["checkpoint-10", "checkpoint-100"]
    assert steps(folder) == [100, 10]
    newest = next(folder.newest(FACTS))
    assert (newest.path / "model").read_text() == "values"


def test_what_breaks_off_is_not_there(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path, "run")
    add(folder, 1)
    with contextlib.suppress(OSError), folder.adding(2, FACTS) as draft:
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


@pytest.mark.parametrize("name", ["model", "run.json"])
def test_a_damaged_one_is_told_and_the_one_before_it_taken(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointDir(tmp_path, "run")
    add(folder, 1)
    add(folder, 2)
    for damage in (lambda file: file.write_bytes(file.read_bytes()[:-4]), lambda file: file.unlink()):
        damage(tmp_path / "checkpoint-2" / name)
        caplog.clear()
        assert steps(folder) == [1]
        assert "checkpoint-2" in caplog.text
        assert "it is not used" in caplog.text
    (tmp_path / "checkpoint-1" / name).unlink()
    assert steps(folder) == []
    assert folder.has_any()


def test_other_settings_are_named(tmp_path: Path) -> None:
    folder = CheckpointDir(tmp_path, "run")
    add(folder, 1)
    with pytest.raises(ConfigError, match=r"checkpoint-1 was made with other settings: learning_rate 0.01 there, 1 he"):
        next(folder.newest(FACTS | {"learning_rate": "1"}))
    with pytest.raises(ConfigError, match="layers unknown there, 4 here"):
        next(folder.newest(FACTS | {"layers": "4"}))


def test_what_is_not_this_runs_is_refused(tmp_path: Path) -> None:
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
