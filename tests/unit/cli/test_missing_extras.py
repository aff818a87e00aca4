"""A command that needs a package of an extra says in one line which extra to install, and prints no traceback."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from manyhands.base.errors import MissingExtra
from manyhands.cli.main import run

SOURCE = Path(__file__).parents[3] / "src"

EXAMPLES = Path(__file__).parents[3] / "examples" / "albert"

RUN_ALL = """
import contextlib, io, json, sys, traceback
from manyhands.cli.main import run

outcomes = []
for words in json.loads(sys.stdin.read()):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = run(words)
        except BaseException:
            code = traceback.format_exc()
    outcomes.append((code, said.getvalue()))
print(json.dumps(outcomes))
"""


def install(
    folder: Path, requirement: str, extras: Sequence[str] = (), done: set[tuple[str, ...]] | None = None
) -> None:
    """Link what a requirement needs, out of the packages of this Python, into a folder."""
    done = set() if done is None else done
    wanted = Requirement(requirement)
    key = (re.sub("[-_.]+", "-", wanted.name).lower(), *sorted(wanted.extras))
    if key in done or (wanted.marker and not any(wanted.marker.evaluate({"extra": one}) for one in ("", *extras))):
        return
    done.add(key)
    try:
        distribution = importlib.metadata.distribution(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return
    tops = {path.parts[0] for path in distribution.files or () if path.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        if not (folder / top).exists():
            (folder / top).symlink_to(distribution.locate_file(top))
    for needed in distribution.requires or ():
        install(folder, needed, list(wanted.extras), done)


def python(site: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A Python that has manyhands and the packages in a folder, and no others."""
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        input=stdin, capture_output=True, text=True, check=False, cwd=site.parent, timeout=120.0,
        env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{site}"},
    )  # fmt: skip


def check(site: Path, expected: Mapping[str, str]) -> None:
    """Run command lines in one Python; each must name its extra in one line."""
    done = python(site, "-c", RUN_ALL, stdin=json.dumps([line.split() for line in expected]))
    assert done.returncode == 0, done.stderr
    for (line, extra), (code, said) in zip(expected.items(), json.loads(done.stdout), strict=True):
        assert code == 2, f"{line}: {code}"
        assert said.count("\n") == 1, f"{line}: {said}"
        assert str(MissingExtra("", extra)) in said, f"{line}: {said}"


def test_each_command_of_a_bare_install_names_the_extra_that_it_needs(tmp_path: Path) -> None:
    """In ``make test`` although it takes 3 s: a package that is imported too early ends every bare install."""
    site = tmp_path / "site"
    site.mkdir()
    install(site, "manyhands")
    named = "--initial-peers 127.0.0.1:1"
    check(
        site,
        {
            "train": "albert",
            f"train {named}": "albert",
            f"train {named} --auxiliary": "albert",
            "train --dataset-url http://127.0.0.1:1/index.json": "albert",
            "train --tunnel ngrok": "ngrok",
            "join 127.0.0.1:1": "albert",
            "join 127.0.0.1:1 --dataset-path data": "albert",
            f"evaluate {named}": "albert",
            "demo": "albert",
            "data prepare": "albert",
            "data verify .": "albert",
            "data serve .": "data",
            "monitor --wandb-project x": "wandb",
            "monitor --tensorboard x": "tensorboard",
            "monitor --trackio x": "trackio",
            "monitor --web 0": "web",
            "monitor --checkpoint-dir x": "albert",
            "aws status --name a": "aws",
        },
    )
    script = python(site, str(EXAMPLES / "run_trainer.py"), "--initial_peers", "127.0.0.1:1")
    assert (script.returncode, script.stderr) == (2, f"manyhands: {MissingExtra('the ALBERT recipe', 'albert')}\n")


@pytest.mark.long
def test_a_trainer_names_the_extra_of_an_option(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site, "manyhands[albert]")
    check(
        site,
        {
            "train --dataset-url http://127.0.0.1:1/index.json": "data",
            "train --dataset-url http://127.0.0.1:1/data.tar": "data",
            "train --tensorboard x": "tensorboard",
            "train --web 0": "web",
            "data verify http://127.0.0.1:1/": "data",
            "data serve .": "data",
        },
    )


@pytest.mark.parametrize("missing", ["torch", "transformers", "tokenizers", "numpy", "blake3", "safetensors"])
def test_a_machine_that_had_only_some_of_the_packages_before_names_the_extra(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    assert run(["train", "--checkpoint-dir", "no-such-folder"]) == 2
    assert capsys.readouterr().err == f"manyhands: {MissingExtra('the ALBERT recipe', 'albert')}\n"
