"""A folder belongs to one process, which may keep several things in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.base.errors import ConfigError
from manyhands.base.folder_lock import FolderInUse, FolderLock


def is_free_for_another_process(path: Path) -> bool:
    code = (
        "import sys; from pathlib import Path; from manyhands.base.folder_lock import FolderInUse, FolderLock\n"
        "try: FolderLock(Path(sys.argv[1]), 'state dir')\n"
        "except FolderInUse: sys.exit(3)"
    )
    return subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60).returncode == 0


def test_one_process_has_one_lock_for_all_that_it_keeps_in_a_folder(tmp_path: Path) -> None:
    state, checkpoints = FolderLock(tmp_path, "state dir"), FolderLock(tmp_path / "." / "", "checkpoint folder")
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    assert not is_free_for_another_process(tmp_path)
    state.release()
    state.release()
    assert not is_free_for_another_process(tmp_path), "the checkpoints are still in use"
    checkpoints.release()
    assert is_free_for_another_process(tmp_path)


def test_one_purpose_has_a_folder_once(tmp_path: Path) -> None:
    first = FolderLock(tmp_path, "state dir")
    with pytest.raises(FolderInUse, match=r"state dir .* is in use by another peer; .* a state dir of its own"):
        FolderLock(tmp_path, "state dir")
    first.release()
    FolderLock(tmp_path, "state dir").release()


def test_a_folder_that_another_process_uses_is_refused_for_every_purpose(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from manyhands.base.folder_lock import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1]), 'state dir'); print('locked', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(FolderInUse, match=r"checkpoint folder .* is in use by another peer"):
            FolderLock(tmp_path, "checkpoint folder")
        other.stdin.close()
    FolderLock(tmp_path, "checkpoint folder").release()


def test_locking_a_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        FolderLock(tmp_path / "file", "state dir")
