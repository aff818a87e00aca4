"""``--web`` and what is wrong with it, before anything is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.base.errors import ConfigError
from manyhands.checkpoints.checkpoint_dir import checkpoints_in
from manyhands.cli.main import run
from manyhands.cli.web_page import Playground
from manyhands.recipes.albert.fill import FilledText

USAGE = 2
COMMANDS = ["monitor", "train"]


@pytest.fixture
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield f"127.0.0.1:{other.getsockname()[1]}"


@pytest.mark.parametrize("command", COMMANDS)
def test_taken_port_is_one_line(
    command: str, taken_port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([command, "--web", taken_port]) == USAGE
    out, err = capsys.readouterr()
    assert err.startswith(f"manyhands: --web {taken_port}: Address already in use; name another address, for example")
    assert err.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("words", "said"), [
    (["monitor", "--web", "here"], "'here' is not HOST:PORT"),
    (["monitor", "--web", "1:2", "3:4"], "it takes one HOST:PORT"),
    (["monitor", "--web", "--playground"], "give --web and --checkpoint-dir too"),
    (["monitor", "--playground", "--checkpoint-dir", "kept"], "give --web and --checkpoint-dir too"),
    (["first-peer", "--web"], "add --charter FILE, or start manyhands monitor --run-id NAME --web"),
    (["demo", "--web", "here"], "'here' is not HOST:PORT"),
])  # fmt: skip
def test_options_of_the_web_page_that_cannot_work_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == USAGE
    assert said in capsys.readouterr().err


def test_model_that_is_not_there_yet_is_said_without_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    with pytest.raises(ConfigError, match="there is no checkpoint in kept") as caught:
        Playground(folder)("a [MASK]")
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(ConfigError, match="no \\[MASK\\]"):
        Playground(folder)("a text")


def test_box_of_the_model_names_no_place_for_a_folder_given_as_a_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").mkdir()
    monkeypatch.chdir(tmp_path / "kept")
    with pytest.raises(ConfigError, match="there is no checkpoint in kept"):
        Playground(Path())("a [MASK]")


def test_model_is_loaded_once_for_each_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    class CountedFiller:
        def __init__(self, path: Path) -> None:
            loaded.append(path.name)

        def fill(self, text: str) -> FilledText:
            return FilledText(text, [])

    monkeypatch.setattr("manyhands.recipes.albert.fill.MaskFiller", CountedFiller)
    monkeypatch.setattr("manyhands.cli.web_page.newest_checkpoint", lambda folder: checkpoints_in(folder)[0])
    playground = Playground(tmp_path)
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        for _ in range(3):
            playground("a [MASK]")
    os.utime(tmp_path / "checkpoint-10", (1.0, 1.0))  # the run was begun anew, and has come to this step again
    playground("a [MASK]")
    assert loaded == ["checkpoint-9", "checkpoint-10", "checkpoint-10"]


def test_commands_work_without_the_extra() -> None:
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('starlette', 'uvicorn', 'prometheus_client'):\n"
        "            raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import manyhands.cli.main\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60.0)
