"""What a start that fails leaves behind."""

from __future__ import annotations

import logging
from contextlib import closing, suppress
from pathlib import Path

import pytest

from manyhands.base.errors import ConfigError
from manyhands.cli.taking_part import Start
from manyhands.state_dir import StateDir


@pytest.mark.parametrize(
    ("error", "has_succeeded", "file", "is_kept"),
    [
        (ConfigError, False, None, False),
        (ConfigError, True, None, True),  # it was in the run, and others have its address
        (ConfigError, False, "lease", True),
        (KeyboardInterrupt, False, None, True),
        (None, False, None, True),
    ],
)
def test_a_new_folder_is_removed_if_the_start_fails_and_it_holds_an_identity_at_most(
    error: type[BaseException] | None, has_succeeded: bool, file: str | None, is_kept: bool, tmp_path: Path
) -> None:
    path = tmp_path / "folder"
    folder = StateDir(path)
    assert folder.is_new
    with suppress(ConfigError, KeyboardInterrupt), closing(folder), Start() as start:
        start.removes(path)
        folder.identity_path.touch()
        folder.save_port(31337)
        if file is not None:
            (path / file).touch()
        if has_succeeded:
            start.has_succeeded()
        if error is not None:
            raise error
    assert path.exists() is is_kept
    assert StateDir(path).is_new is not is_kept


@pytest.mark.parametrize(
    ("error", "has_succeeded", "is_told"),
    [(KeyboardInterrupt, False, True), (KeyboardInterrupt, True, False), (ConfigError, False, False)],
)
def test_ctrl_c_before_a_start_has_succeeded_is_told(
    error: type[BaseException], has_succeeded: bool, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "manyhands")
    with suppress(ConfigError, KeyboardInterrupt), Start() as start:
        start.tells_of_ctrl_c()
        if has_succeeded:
            start.has_succeeded()
        raise error
    assert ("Stopped before the training began" in caplog.text) is is_told
