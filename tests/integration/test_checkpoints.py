"""The program in docs/how-to/checkpoints.md trains, and goes on from its checkpoint when it is started again."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model

from manyhands.cli.main import run

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "checkpoints.md"


def test_the_program_on_the_page_runs_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    match = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert match is not None
    program = match.group(1).replace("Peer(", "Peer(listen=['127.0.0.1:0'], ")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    before: dict[str, object] = {}
    exec(compile(program.replace("< 30", "< 15"), str(PAGE), "exec"), before)
    assert capsys.readouterr().out.endswith("begin at global step 0\n")
    names = {path.name for path in (tmp_path / "my-run").iterdir()}
    of_peer = {"lock", "identity.pem", "port", "addresses"}
    assert names == {*of_peer, "checkpoint-10", "checkpoint-15"}, "the peer's identity too, and one lock"

    after: dict[str, object] = {}
    exec(compile(program, str(PAGE), "exec"), after)
    assert capsys.readouterr().out.endswith("begin at global step 15\n")

    assert run(["checkpoint", "verify", "my-run"]) == 0
    assert run(["checkpoint", "export", "my-run", "--to", "out"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    trained = after["model"]
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    load_model(model, "out/model.safetensors")
    assert isinstance(trained, torch.nn.Module)
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in model.state_dict().items())
