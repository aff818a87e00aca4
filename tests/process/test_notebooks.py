"""The notebooks run from the first cell to the last, on small parameters."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

from manyhands.cli.main import run as run_command
from manyhands.cli.notebook_command import filled
from tests.integration.clouds import UBUNTU
from tests.process.commands import LOOPBACK, running
from tests.process.test_firewalled import TINY

pytestmark = [pytest.mark.process, pytest.mark.long]

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = REPOSITORY / "examples" / "notebooks"
FAKES = REPOSITORY / "tests" / "fakes"
EXECUTE = """
import asyncio, pathlib, sys
import nbclient, nbformat
path, interrupt_at = pathlib.Path(sys.argv[1]), sys.argv[2]
notebook = nbformat.read(path, as_version=4)
client = nbclient.NotebookClient(
    notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
)

async def main():
    running = asyncio.create_task(client.async_execute())
    while interrupt_at and interrupt_at not in str(notebook.cells) and not running.done():
        await asyncio.sleep(0.1)
    if interrupt_at:
        await client.km.interrupt_kernel()
    await asyncio.wait([running])
    assert running.exception() is None or isinstance(running.exception(), nbclient.exceptions.CellExecutionError)

asyncio.run(main())
nbformat.write(notebook, path)
"""
"""In a process of its own, as nbclient leaves sockets and an event loop behind."""
TRAINER_ENDED = "The trainer ended; the line above says why."
TEXT = "\n\n".join(f"Number {n} is here. After it comes number {n + 1}. That is all." for n in range(600))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs of this Python are on the path, and there is a text."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "text").write_text(TEXT)


def executed(text: str, folder: Path, interrupt_at: str = "") -> str:
    """All that the cells of a notebook print when they run in a folder, one after the other, and the error of one.

    Args:
        interrupt_at: when this was printed, the running cell is interrupted.
    """
    path = folder / "executed.ipynb"
    path.write_text(text)
    subprocess.run([sys.executable, "-W", "ignore", "-c", EXECUTE, str(path), interrupt_at], check=True, timeout=550)
    outputs = [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", output.get("evalue", "")) for output in outputs)


def test_join_contributes_to_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = ("train", "--run-id", "mine", *TINY, "--text", str(tmp_path / "text"), "--listen", LOOPBACK)
    with running(*begin, "--batch-size", "4", "--slow-down", "5") as trainer:
        address = trainer.wait_for("Others can join through this peer").split()[-1]
        trainer.wait_for("manyhands join")
        assert run_command(["notebook", "--run-id", "mine", "--initial-peers", address]) == 0
        written = capsys.readouterr().out.replace("NEEDS_GPU = True", "NEEDS_GPU = False")
        options = f"--text {tmp_path / 'text'} --threads 1 --batch-size 4"
        text = filled(written, {"OPTIONS": options, "FOLDER": str(tmp_path / "kept")})
        output = executed(text, tmp_path, interrupt_at="Averaged tensors successfully with 2 peers")
        assert "--client-mode" in output
        after = output.split("Averaged tensors successfully with 2 peers", 1)[1]
        assert "Traceback" not in after
        assert TRAINER_ENDED not in after
        assert list((tmp_path / "kept").glob("checkpoint-*/model.safetensors"))


def write_nvidia_smi(folder: Path, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


WITHOUT_DRIVER = "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9"
WITH_A_WARNING = "echo 'WARNING: infoROM is corrupted' >&2; echo 'Tesla T4, 15360'"


@pytest.mark.parametrize(
    ("nvidia_smi", "change", "message"),
    [
        ("", ("", ""), "Runtime > Change runtime type > T4 GPU"),
        (WITHOUT_DRIVER, ("", ""), "Runtime > Change runtime type > T4 GPU"),
        ("", ("NEEDS_GPU = True", "NEEDS_GPU = False"), "into the field INITIAL_PEERS"),
    ],
)
def test_the_join_notebook_without_gpu_or_address_says_what_to_do(
    nvidia_smi: str, change: tuple[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if nvidia_smi:
        write_nvidia_smi(tmp_path, nvidia_smi)
    monkeypatch.setenv("PATH", str(tmp_path))
    output = executed((NOTEBOOKS / "join.ipynb").read_text().replace(*change), tmp_path)
    assert message in output.splitlines()[-1]
    assert "-m manyhands join" not in output


@pytest.mark.parametrize(
    ("nvidia_smi", "expected"),
    [
        ("echo 'Tesla T4, 15360'", "--batch-size 4"),
        (WITH_A_WARNING, "--batch-size 4"),
        ("echo 'Tesla P100-PCIE-16GB, 16384'", "--batch-size 4"),
        ("echo 'Tesla K80, 11441'", "--batch-size 1"),
        ("echo 'NVIDIA A100-SXM4-40GB, 40960'", ""),
        ("echo 'NVIDIA A100-SXM4-40GB MIG 1g.5gb, [N/A]'", ""),
    ],
)
def test_join_chooses_the_batch_size_by_the_gpu(
    nvidia_smi: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_nvidia_smi(tmp_path, nvidia_smi)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    output = executed(filled((NOTEBOOKS / "join.ipynb").read_text(), {"INITIAL_PEERS": "127.0.0.1:9"}), tmp_path)
    [command] = [line for line in output.splitlines() if "-m manyhands join" in line]
    assert command.partition("--client-mode")[2].strip() == expected
    *_, reason, last = output.splitlines()
    assert "nothing listens on that port" in reason, "why it did not join"
    assert last == TRAINER_ENDED


def fields_behind_tunnels(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Fields of ``start_a_run.ipynb``; a fake takes the place of ngrok."""
    path = [str(FAKES), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("NGROK_AUTHTOKEN", "good-token")
    return {"RUN_ID": "mine", "MONITOR_OPTIONS": f"--listen {LOOPBACK}"}


def test_a_trainer_that_does_not_start_fails_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = fields_behind_tunnels(monkeypatch) | {"TRAIN_OPTIONS": "--modle x"}
    output = executed(filled((NOTEBOOKS / "start_a_run.ipynb").read_text(), fields), tmp_path)
    *_, reason, last = output.splitlines()
    assert "Unknown option: --modle" in reason
    assert last == TRAINER_ENDED


def test_the_notebook_that_starts_a_run_trains_and_monitors_behind_tunnels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = fields_behind_tunnels(monkeypatch)
    stop_file, log = tmp_path / "stop", tmp_path / "monitor.log"
    options = f"{' '.join(TINY)} --text {tmp_path / 'text'} --batch-size 4 --stop-file {stop_file} --listen {LOOPBACK}"
    notebook = filled((NOTEBOOKS / "start_a_run.ipynb").read_text(), fields | {"TRAIN_OPTIONS": options})
    with ThreadPoolExecutor() as pool:
        run = pool.submit(executed, notebook, tmp_path)
        while not run.done() and not (log.exists() and "Step #" in log.read_text()):
            time.sleep(0.1)  # a run of a few small steps can end before the monitor looks again
        stop_file.write_text("1")  # global step
        output = run.result()
    assert output.count("Ngrok tunnel created: tcp://localhost:") >= 2
    assert "Optimizer step: done! Step 1," in output
    assert "Collaboration accumulated" in output.rpartition("Optimizer step: done!")[2], "what the monitor saw"
    assert TRAINER_ENDED not in output
    nbformat.validate(nbformat.read(tmp_path / "join.ipynb", as_version=4))


def test_aws_plans_without_creating_anything(tmp_path: Path) -> None:
    output = executed((NOTEBOOKS / "aws.ipynb").read_text(), tmp_path)
    assert "Nothing was created: a dry run." in output
    assert "Nothing was ended. Machines that run cost money: set COSTS_MONEY, or run manyhands aws down" in output


@pytest.fixture
def aws_notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The notebook of somebody who pays, with moto's server in place of AWS."""
    from moto.server import ThreadedMotoServer  # its import takes seconds, which each worker of `make test` would spend

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    options = f"--image {UBUNTU} --cpu-image {UBUNTU} --source https://example.org/manyhands.whl"
    text = filled((NOTEBOOKS / "aws.ipynb").read_text(), {"REGION": "us-east-1", "OPTIONS": options})
    yield text.replace("COSTS_MONEY = False", "COSTS_MONEY = True")
    urllib.request.urlopen(urllib.request.Request(f"{address}/moto-api/reset", method="POST")).close()
    server.stop()


def test_the_aws_notebook_creates_an_experiment_and_deletes_it(aws_notebook: str, tmp_path: Path) -> None:
    output = executed(aws_notebook, tmp_path)
    assert "    manyhands join " in output
    assert "\x1b" not in output, "plain lines, nothing that is redrawn"
    assert "Stack manyhands-my-experiment in us-east-1: CREATE_COMPLETE" in output
    assert "Nothing of experiment my-experiment is left in us-east-1." in output


def test_an_aws_up_that_fails_fails_its_cell(
    aws_notebook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "moto.cloudformation.models.Stack.create_resources", lambda self: setattr(self, "status", "DELETE_COMPLETE")
    )
    *_, reason, last = executed(aws_notebook, tmp_path).splitlines()
    assert "AWS could not create the machines, and deletes them" in reason
    assert last == "manyhands aws up failed; the line above says why."


def test_an_interrupted_aws_up_is_deleted(aws_notebook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "moto.cloudformation.models.Stack.create_resources", lambda self: setattr(self, "status", "CREATE_IN_PROGRESS")
    )
    output = executed(aws_notebook, tmp_path, interrupt_at="AWS creates the machines")
    assert "Deleting what AWS has created" in output
    assert "Nothing of experiment" not in output, "the cells after it do not run"
