"""The command line as a user meets it."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys

import pytest

import manyhands
from manyhands.cli.demo import command as demo_command
from manyhands.cli.main import app, run
from manyhands.cli.monitor_command import welcome
from manyhands.cli.train_command import train


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        *([name, "--help"] for name in ("data", "demo", "doctor", "fill", "first-peer", "monitor", "plan", "train")),
        ["checkpoint", "--help"],
        ["aws", "up", "--help"],
        ["data", "prepare", "--help"],
    ],
)
def test_each_command_has_a_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command) == 0
    assert "Usage: manyhands" in capsys.readouterr().out


def test_help_shows_defaults_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["train"], ["doctor"], ["data", "prepare"]):
        assert run([*command, "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert not re.search(r"default: ?(\(|None|\])", shown)
        assert ("[default: 0] --announce" in shown) == (command[0] != "data")


def test_an_old_option_that_does_nothing_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--overwrite_output_dir", "--run-id", "a.b"]) == 2
    note, error = capsys.readouterr().err.splitlines()
    assert note.startswith("Note: --overwrite_output_dir does nothing here: ")
    assert error.startswith("manyhands: run_id 'a.b'")


def test_options_may_be_written_with_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["monitor", "--run_id", "a.b"]) == 2
    assert "run_id 'a.b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--initial-peers", "nonsense"], "cannot read address 'nonsense'"),
        (["rubbish"], "cannot read address 'rubbish'"),
        (["--initial-peers", "127.0.0.1:1", "--listen", "nowhere"], "cannot read address 'nowhere'"),
        ([], "no initial peer is given (or a variable of the shell is unset)"),
        (["--initial-peers"], "manyhands doctor HOST:PORT"),
        (["127.0.0.1:99", "--initial-peers", *(f"127.0.0.1:{port}" for port in range(1, 17))], "at most 16"),
    ],
)
def test_a_doctor_is_told_what_it_shall_examine(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert not said.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["join"], 'Command "join" parameter ADDRESS requires an argument'),
        (["fill", "folder"], 'Command "fill" parameter --text requires an argument'),
        (["run", "create"], 'Command "run create" parameter --run-id requires an argument'),
        (["train", "--run-id"], 'Command "train" parameter --run-id requires an argument'),
        (["train", "--no-client-mode", "--client-mode"], "Parameter --client-mode specified multiple times"),
    ],
)
def test_missing_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("evaluate 127.0.0.1:41337", "evaluate takes addresses after an option: write --initial-peers 127.0.0.1:41337"),
        ("train --run-id r -- mh1abc", "train takes addresses after an option: write --initial-peers mh1abc"),
        ("monitor now", """monitor cannot use 'now'; "manyhands monitor --help" shows an example"""),
        ("join mh1abc def", "join takes one address or ticket, and 'def' is left over; copy a ticket as one word"),
        ("join 127.0.0.1:1 --hidden-size 512", "--hidden-size comes from the run: leave it out"),
        ("join 127.0.0.1:1 --model=small", "--model comes from the run: leave it out (manyhands train --initial-peers"),
        ("monitor --hidden-size 64", "--hidden-size is set by the trainers of a run: leave it out"),
        ("train --batch-size {size}", "--batch-size is '{size}'; it must be a whole number, for example 4"),
        ("train --batch_size=1.5", "--batch_size is '1.5'; it must be a whole number, for example 4"),
        ("join 127.0.0.1:1 --threads 0.5", "--threads is '0.5'; it must be a whole number, for example 4"),
        ("data prepare --shards 2.0", "--shards is '2.0'; it must be a whole number, for example 4"),
        ("train --learning-rate much", "--learning-rate is 'much'; it must be a number, for example 0.5"),
        ("join 127.0.0.1:1 --run-ib x", "Unknown option: --run-ib. Did you mean --run-id?"),
    ],
)
def test_superfluous_and_mistyped_arguments_are_refused_with_what_to_write(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words.split()) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.splitlines()) == 1, errors


def test_a_monitor_never_imports_torch() -> None:
    code = (
        "import sys, manyhands, manyhands.monitor, manyhands.doctor, manyhands.cli.main;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_first_screen_begins_with_what_a_newcomer_tries_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    screen = capsys.readouterr().out
    names = ("demo", "join", "train", "monitor", "fill", "doctor", "ban", "aws")
    places = [screen.index(f" {name} ") for name in names]
    assert places == sorted(places)
    assert screen.index("--version") > places[-1]


def test_a_monitor_needs_no_package_of_an_extra() -> None:
    extras = ["torch", "numpy", "transformers", "tokenizers", "datasets", "accelerate", "huggingface_hub"]
    extras += ["boto3", "botocore", "wandb", "tensorboardX", "blake3", "numba", "safetensors", "matplotlib"]
    code = f"import sys; sys.modules.update(dict.fromkeys({extras})); import manyhands.cli.main"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_command_leaves_the_signal_handlers_as_they_were() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert run(["--help"]) == 0
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2097152 bytes."),
    ],
)
def test_too_little_memory_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(demo_command, "require_albert", fail)
    assert run(["demo"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("manyhands: out of memory (")
    assert errors.count("\n") == 1


def test_the_command_that_a_monitor_prints_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    with manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"]) as peer:
        welcome("-lead", peer, ())
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "manyhands train" in line]
        command, bound, _ = app.parse_args(shlex.split(line)[1:], exit_on_error=False, print_error=False)
        assert command is train
        assert bound.arguments["run_id"] == "-lead"
        assert list(bound.arguments["network"].initial_peers) == peer.addresses
