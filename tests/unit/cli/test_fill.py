"""``manyhands fill`` on what is no model; :mod:`tests.process.test_live_view` has it on one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from manyhands.cli.main import run

USAGE = 2


@pytest.mark.parametrize(
    ("folder", "text", "message"),
    [
        ("missing", "a [MASK]", "missing is not a folder"),
        ("empty", "a [MASK]", "one every 100 global steps (--checkpoint-every), and when it ends, also after Ctrl-C"),
        ("checkpoint-1", "a text", "the text has no [MASK]"),
        ("checkpoint-1", "Zo\udcc3\udcab [MASK]", "the text is not UTF-8"),
        ("checkpoint-1", "a [MASK]", "cannot be loaded"),
        ("checkpoint-2", "a [MASK]", "holds a model of type 'bert'"),
    ],
)
def test_fill_refuses_bad_folders_and_texts_in_one_line(
    folder: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config in (("checkpoint-1", "{}"), ("checkpoint-2", '{"model_type": "bert"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "empty").mkdir()
    assert run(["fill", str(tmp_path / folder), text]) == USAGE
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_fill_without_its_packages_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(["fill", str(tmp_path), "a [MASK]"]) == USAGE
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "[albert]" in line
