"""The command lines of the tutorials, as they stand there; addresses, and one path, are filled in."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.process.commands import Command
from tests.process.test_monitor import HELDOUT_FIELDS, STEP_FIELDS
from tests.unit.monitor.curve_files import tensorboard_points, wandb_points

pytestmark = pytest.mark.process

SCRIPTS = Path(__file__).parents[2] / "examples" / "albert"
INTERRUPTED = 130

MONITOR = (
    "run_training_monitor.py --dht_listen_on '[::]:*' --experiment_prefix my-first-albert --wandb_project Demo-run"
)
TRAINER = """run_trainer.py \\
 --experiment_prefix my-first-albert --initial_peers ONE_OR_MORE_PEERS --seed 42 \\
 --logging_first_step --logging_steps 100  --output_dir ./outputs --overwrite_output_dir --logging_dir ./logs"""
NOTEBOOK = """run_trainer.py \\
 --client_mode --initial_peers ONE_OR_MORE_PEERS  --averaging_expiration 10 \\
 --batch_size_lead 300 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 \\
 --logging_first_step --logging_steps 100  --output_dir ./outputs --overwrite_output_dir --logging_dir ./logs \\
 --experiment_prefix my-first-albert --seed 42"""
LATER = "run_trainer.py  --initial_peers ONE_OR_MORE_PEERS --per_device_train_batch_size 8"
FIRST_PEER = "run_first_peer.py --listen_on [::]:0"
AFTER_FIRST_PEER = """run_trainer.py \\
  --output_dir ./outputs --overwrite_output_dir \\
  --logging_dir ./logs --logging_first_step --logging_steps 100 \\
  --initial_peers ONE_OR_MORE_PEERS --seed 0"""
ALPHA = """run_trainer.py \\
 --client_mode --initial_peers ONE_OR_MORE_PEERS --averaging_expiration 10 --statistics_expiration 120 \\
 --batch_size_lead 200 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 \\
 --logging_first_step --logging_steps 100  --output_dir ./outputs --overwrite_output_dir --logging_dir ./logs \\
 --experiment_prefix albert --seed 42"""

LOG = [
    r"Loss of batch 1: \d+\.\d{5}",
    r"Collaboration accumulated \d+ samples from \d peers?; ETA \d+\.\d\d seconds \(refresh in \d+\.\d\ds\.\)",
    r"Averaged tensors successfully with [2-9] peers",
    r"Optimizer step: done!",
    r"Step \d+\n",
    r"Your current contribution: \d+ samples?",
    r"Performance: \d+\.\d{3} samples/sec",
    r"Local loss: \d+\.\d{5}",
]
"""What the tutorials show of a trainer."""

TINY = {
    "model_type": "albert", "vocab_size": 4096, "embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip


@contextmanager
def started(line: str, folder: Path, peers: str = "", *more: str) -> Iterator[Command]:
    """A script in a folder of its own, as somebody types it."""
    folder.mkdir(exist_ok=True)
    script, *arguments = shlex.split(line.replace("\\\n", " ").replace("ONE_OR_MORE_PEERS", peers))
    command = Command([str(SCRIPTS / script), *arguments, *more], module=None, folder=folder)
    try:
        yield command
    finally:
        command.close()


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so many processes on few cores
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def leave(*commands: Command) -> None:
    for command in commands:
        command.interrupt()
    for command in commands:
        assert command.wait() == INTERRUPTED, command.output
        assert "Traceback" not in command.output


def test_one_requirements_file_has_what_all_the_scripts_need() -> None:
    """``pip install -r requirements.txt``, as the tutorials have it."""
    extras = {
        path.name: {extra for line in lines if not line.startswith("#") for extra in Requirement(line).extras}
        for path in SCRIPTS.glob("requirements*.txt")
        if (lines := path.read_text().splitlines())
    }
    metadata = distribution("manyhands").metadata
    all_of_them = extras.pop("requirements.txt")
    assert all_of_them <= set(metadata.get_all("Provides-Extra") or ())
    needs_albert = "data" in all_of_them  # which includes it
    assert set().union(*extras.values()) <= all_of_them | ({"albert"} if needs_albert else set())
    assert "wandb" in all_of_them


@pytest.mark.long
def test_the_tutorial_works_with_a_monitor_three_trainers_and_an_evaluator(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    at_monitor = tmp_path / "monitor"
    with started(MONITOR, at_monitor, "", "--tensorboard", "curves") as monitor:
        address = monitor.wait_for("Running DHT root at").split()[-1]
        monitor.wait_for("Found no active peers")
        with (
            started(TRAINER, tmp_path / "first", address, "--config_path", str(config)) as first,
            started("run_evaluator.py --initial_peers ONE_OR_MORE_PEERS --every 8", tmp_path, address) as evaluator,
        ):
            first.wait_for("Optimizer step: done!")
            with started(NOTEBOOK, tmp_path / "notebook", address) as notebook:
                notebook.wait_for("Averaged tensors successfully with 2 peers")
                with started(LATER, tmp_path / "later", address) as later:
                    later.wait_for("Averaged tensors successfully with 3 peers")
                    losses = [float(evaluator.wait_for("Held-out loss").split("loss ")[1].split(",")[0])]
                    while len(losses) < 2 or (losses[-1] > losses[0] - 0.05 and len(losses) < 12):
                        losses.append(float(evaluator.wait_for("Held-out loss").split("loss ")[1].split(",")[0]))
                    assert losses[-1] < losses[0]
                    monitor.wait_for("Held-out loss")
                    leave(later, notebook, evaluator, first)
        leave(monitor)
    for pattern in LOG:
        assert re.search(pattern, first.output), pattern
        assert re.search(pattern, notebook.output), pattern
    assert re.search(r"Step #\d+  loss = \d+\.\d{5}", monitor.output)
    assert "offline" in monitor.output
    for points in (wandb_points(at_monitor), [point for _, point in tensorboard_points(at_monitor / "curves")]):
        assert any(point.keys() == STEP_FIELDS for point in points)
        assert any(point.keys() == HELDOUT_FIELDS for point in points)
    own_curves = [point for _, point in tensorboard_points(tmp_path / "first" / "logs")]
    assert any("local loss" in point for point in own_curves)
    assert list((tmp_path / "first" / "outputs").glob("checkpoint-*"))


@pytest.mark.long
def test_the_tutorial_works_with_a_first_peer_and_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVEMIND_THREADS", "256")
    with started(FIRST_PEER, tmp_path / "coordinator") as coordinator:
        address = coordinator.wait_for("--initial-peers").split()[-1]
        with started(AFTER_FIRST_PEER, tmp_path / "trainer", address) as trainer:
            trainer.wait_for("Collaboration accumulated")
            with started(ALPHA, tmp_path / "notebook", address) as notebook:
                notebook.wait_for("from 2 peers")
                leave(notebook, trainer)
        leave(coordinator)
    assert "Beginning run albert as peer" in trainer.output
    assert "Joining run albert as peer" in notebook.output
    assert "HIVEMIND_THREADS does nothing here: the network has one thread, and needs no more" in notebook.output
