"""``manyhands checkpoint`` without a model; :mod:`tests.process.test_checkpoints` has it on a real one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from manyhands.base.parameter_spec import ParameterSpec
from manyhands.checkpoints.checkpoint_dir import CheckpointDir, checkpoints_in
from manyhands.cli import checkpoint_command
from manyhands.cli.main import run
from manyhands.optim.manifest import RunManifest

OK, PROBLEM, USAGE = 0, 1, 2
RUN = RunManifest(
    protocol="manyhands/1", run_id="my-run", target_batch_size=64,
    tensors=[ParameterSpec("weight", (4, 300), "float32"), ParameterSpec("bias", (300,), "float32")],
    frozen=["bias"], optimizer="AdamW", hyper_parameters=[{"lr": 0.01}], scheduler="", codec="none",
    extra={"tokenizer": "a\x1b[2Jb"},
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoints = CheckpointDir(tmp_path / "kept", "my-run")
    for step in (100, 200):
        with checkpoints.adding(step, RUN) as draft:
            (draft / "templates").mkdir()
            names = ("model.safetensors", "optimizer.safetensors", "optimizer.json", "templates/chat.jinja")
            for name in names:
                (draft / name).write_text(f"{name} {step}")
    return tmp_path / "kept"  # still locked, as by a trainer


def test_show_describes_each_checkpoint_and_names_unreadable_ones(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoint", "show", str(folder)]) == OK
    said = capsys.readouterr().out
    assert said.splitlines() == [
        f"{folder}/checkpoint-200: run my-run, global step 200, 88 bytes, format 2",
        f"{folder}/checkpoint-100: run my-run, global step 100, 88 bytes, format 2",
        "  model      1,500 parameters in 2 tensors, 1 frozen",
        "  optimizer  AdamW, 1 parameter group",
        "             lr 0.01",
        "  schedule   none",
        "  batch      64 samples of all peers",
        "  settings   tokenizer a?[2Jb",
    ]
    (folder / "checkpoint-200" / "run.json").write_text("{")
    assert run(["checkpoint", "show", str(folder)]) == PROBLEM
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folder}/checkpoint-200: cannot be read: Input data was truncated")
    assert lines[-1] == said.splitlines()[-1]


def test_show_says_the_schedule_of_an_albert_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"recipe": "albert", "warmup_steps": "6", "total_steps": "10000"}
    run_of_albert = msgspec.structs.replace(RUN, scheduler="LambdaLR(lr_lambdas=[None, None])", extra=extra)
    with CheckpointDir(tmp_path, "my-run").adding(1, run_of_albert) as draft:
        (draft / "model.safetensors").write_text("")
    assert run(["checkpoint", "show", str(tmp_path)]) == OK
    assert "  schedule   linear: warm-up of 6 steps, 10000 in all\n" in capsys.readouterr().out


def test_verify_checks_each_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "verify", str(folder)]) == OK
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}/checkpoint-{step}: 5 files, no problems" for step in (200, 100)
    ]
    (folder / "checkpoint-200" / "model.safetensors").write_text("torn")
    (folder / "checkpoint-200" / "templates" / "chat.jinja").write_text("templates/chat.jinja 201")
    (folder / "checkpoint-100" / "optimizer.json").unlink()
    assert run(["checkpoint", "verify", str(folder)]) == PROBLEM
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}/checkpoint-200/model.safetensors has 4 bytes instead of 21",
        f"{folder}/checkpoint-200/templates/chat.jinja was altered: it has another SHA-256",
        f"{folder}/checkpoint-100/optimizer.json is missing",
    ]
    assert run(["checkpoint", "verify", str(folder / "checkpoint-100")]) == PROBLEM


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_checkpoint_removed_during_the_command_is_skipped(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(folder: Path) -> list[Path]:
        paths = checkpoints_in(folder)
        shutil.rmtree(folder / "checkpoint-100")
        return paths

    monkeypatch.setattr(checkpoint_command, "checkpoints_in", found)
    assert run(["checkpoint", command, str(folder)]) == OK
    assert "checkpoint-100" not in capsys.readouterr().out


def test_checkpoint_commands_need_no_torch(folder: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'safetensors', 'transformers'): sys.modules[name] = None\n"
        "from manyhands.cli.main import run\n"
        "sys.exit(max(run(['checkpoint', command, sys.argv[1]]) for command in ('show', 'verify', 'export')))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False, cwd=folder.parent
    )
    assert ran.returncode == 0, ran.stderr
    assert (folder.parent / "model-200").is_dir()


def test_export_has_the_model_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "new" / "out"
    assert run(["checkpoint", "export", str(folder), "--to", str(out)]) == OK
    said = capsys.readouterr().out
    assert f"{out}: the model of run 'my-run' at global step 200" in said
    assert f'safetensors.torch.load_model(model, "{out}/model.safetensors")' in said
    files = sorted(file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file())
    assert files == ["model.safetensors", "templates/chat.jinja"]
    assert (out / "model.safetensors").read_text() == "model.safetensors 200"

    assert run(["checkpoint", "export", str(folder), "--to", str(out)]) == USAGE
    assert "is there already; name a folder that does not exist yet" in capsys.readouterr().err

    (folder / "checkpoint-200" / "model.safetensors").write_text("torn")
    assert run(["checkpoint", "export", str(folder), "--to", str(tmp_path / "older")]) == OK
    assert "checkpoint-200 is damaged (model.safetensors has 4 bytes instead of 21); it is not used" in caplog.text
    assert (tmp_path / "older" / "model.safetensors").read_text() == "model.safetensors 100"
    assert run(["checkpoint", "export", str(folder / "checkpoint-200"), "--to", str(tmp_path / "no")]) == USAGE
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("command", ["show", "verify", "export"])
def test_folders_without_a_readable_checkpoint_are_refused_in_one_line(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = folder / "checkpoint-200" / "run.json"
    about.write_bytes(msgspec.json.encode({**msgspec.json.decode(about.read_bytes()), "format": 3}))
    (tmp_path / "empty").mkdir()
    for path, says in (
        (tmp_path / "missing", "missing is not a folder"),
        (tmp_path / "empty", "there is no checkpoint in"),
        (tmp_path, f"there is no checkpoint in {tmp_path} itself; name a folder in it: {folder}"),
        (folder, "checkpoint-200 has format 3, and this version reads format 2; update manyhands, or"),
    ):
        assert run(["checkpoint", command, str(path)]) == USAGE
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"architectures": ["AlbertForPreTraining"]}, "AlbertForPreTraining"),
        ({"architectures": None}, "AutoModel"),
        ({"architectures": ["os; import os"]}, "AutoModel"),
        ([], "AutoModel"),
    ],
)
def test_export_names_the_class_that_was_trained_as_the_general_one_has_no_heads(
    tmp_path: Path, config: object, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with CheckpointDir(tmp_path / "kept", "my-run").adding(1, RUN) as draft:
        (draft / "model.safetensors").write_text("")
        (draft / "config.json").write_bytes(msgspec.json.encode(config))
    out = tmp_path / "out"
    assert run(["checkpoint", "export", str(tmp_path / "kept"), "--to", str(out)]) == OK
    assert f'    model = transformers.{name}.from_pretrained("{out}")\n' in capsys.readouterr().out
