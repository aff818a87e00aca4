"""A run as the tutorials have it: a monitor with curves that keeps the state, trainers, and an evaluator."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest

from manyhands.cli.main import run
from manyhands.monitor.history import open_history
from tests.credited import leaders_in
from tests.process.commands import LOOPBACK, address_of, running
from tests.unit.monitor.curve_files import tensorboard_points, wandb_points
from tests.unit.monitor.fake_hub import fake_hub
from tests.waiting import wait_until

pytestmark = pytest.mark.process

INTERRUPTED, USAGE = 130, 2
WORDS = ("the", "a", "dog", "house", "river", "city", "capital", "of", "france", "is", "was", "big", "runs", "over")
STEP_FIELDS = {"loss", "alive peers", "samples", "performance", "step"}
HELDOUT_FIELDS = {"heldout loss", "mlm accuracy", "sop accuracy", "step"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small corpus."""
    rng = random.Random(0)
    sentences = [" ".join(rng.choices(WORDS, k=9)).capitalize() + "." for _ in range(1200)]
    documents = [" ".join(sentences[start : start + 12]) for start in range(0, len(sentences), 12)]
    path = tmp_path / "small.txt"
    path.write_text("\n\n".join(documents))
    return path


def trainer(text: Path, *more: str) -> tuple[str, ...]:
    return (
        "train", "--run-id", "seen", "--listen", LOOPBACK, "--threads", "1", "--device", "cpu", "--batch-size", "8",
        "--hidden-size", "32", "--num-hidden-layers", "1", "--intermediate-size", "32", "--embedding-size", "16",
        "--vocab-size", "512", "--seq-length", "16", "--target-batch-size", "64", "--linger-s", "0",
        "--text", str(text), "--slow-down", "10", *more,
    )  # fmt: skip


@pytest.mark.long
def test_a_run_is_drawn_and_evaluated_and_its_state_kept(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        have_a_run(text, tmp_path)
    check_curves(tmp_path)

    kept = tmp_path / "monitor" / "kept"
    (newest, *_) = sorted(kept.glob("checkpoint-*"), key=lambda path: -int(path.name.rpartition("-")[2]))
    assert hub.commits
    for message, files in hub.commits:
        assert re.fullmatch(r"Step #\d+, loss \d+\.\d+( at step #\d+)?", message)
        assert files.keys() >= {"config.json", "model.safetensors", "tokenizer.json", "optimizer.safetensors"}
    assert run(["fill", str(kept), "The capital of [MASK] is big."]) == 0
    assert "The capital of " in capsys.readouterr().out
    with running(*trainer(text, "--checkpoint-dir", str(kept))) as later:
        later.wait_for(f"Going on from {newest}")
        later.wait_for("Optimizer step: done!")
        later.interrupt()
        assert later.wait() == INTERRUPTED, later.output


@pytest.mark.long
def test_a_monitor_that_starts_again_has_the_address_of_before(tmp_path: Path) -> None:
    watching = ("monitor", "--run-id", "seen", "--listen", LOOPBACK)
    with running(*watching, folder=tmp_path) as first:
        address = address_of(first)
        with running(*watching, folder=tmp_path) as second:
            assert "uses manyhands-seen.monitor-2" in second.wait_for("in use by another process")
            assert address_of(second) != address
        first.kill()
        first.wait()
    with running(*watching, folder=tmp_path) as again:
        assert address_of(again) == address


def test_a_monitor_needs_no_folder(tmp_path: Path) -> None:
    (tmp_path / "manyhands-seen.monitor").touch()  # as where nothing can be written
    with running("monitor", "--run-id", "seen", "--listen", LOOPBACK, folder=tmp_path) as monitor:
        monitor.wait_for("old tickets are void")
        monitor.wait_for("Found no active peers")


@pytest.mark.long
def test_the_history_credits_each_trainer_with_what_its_own_events_say(text: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    watching = ("monitor", "--run-id", "seen", "--listen", LOOPBACK, "--state-dir", str(state))
    with running(*watching, "--events", str(tmp_path / "monitor.jsonl")) as monitor:
        multiaddr = monitor.wait_for("--initial_peers /ip4/127.0.0.1/tcp/").split()[-1]
        options = ("--initial-peers", multiaddr, "--no-checkpoints", "--start-new", "--max-steps", "4")
        with (
            running(*trainer(text, *options, "--name", "ann", "--events", str(tmp_path / "ann.jsonl"))) as ann,
            running(*trainer(text, *options, "--name", "<img>", "--events", str(tmp_path / "bob.jsonl"))) as bob,
        ):
            assert ann.wait() == 0, ann.output
            assert bob.wait() == 0, bob.output
        monitor.wait_for("Step #4  loss = ")
        # which is written after what the trainers said at their end was credited
        wait_until(lambda: left_in(tmp_path / "monitor.jsonl") == {"ann", "<img>"}, "both have left")
        monitor.interrupt()
        assert monitor.wait() == INTERRUPTED, monitor.output
    history = open_history("seen", state)
    credited = {leader.name: leader.samples for leader in leaders_in(history)}
    used = {}
    for name, file in (("ann", "ann.jsonl"), ("<img>", "bob.jsonl")):
        lines = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        used[name] = lines[-1]["counts"]["samples_used"]
    assert credited == used
    points = history.points()
    assert [point.step for point in points] == [1, 2, 3, 4]
    assert sum(point.samples for point in points) == sum(used.values())
    assert points[-1].learning_rate is not None
    assert points[-1].bytes_sent
    history.close()


def left_in(path: Path) -> set[str]:
    """The names of the peers that have left, in the events of a monitor."""
    said = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {event["name"] for event in said if event["type"] == "happened" and event["kind"] == "left"}


def have_a_run(text: Path, tmp_path: Path) -> None:
    here = tmp_path / "monitor"
    here.mkdir()
    events = tmp_path / "evaluator.jsonl"
    with running(
        "monitor", "--run-id", "seen", "--listen", LOOPBACK, "--wandb-project", "demo", "--wandb-mode", "offline",
        "--tensorboard", "curves", "--checkpoint-dir", "kept", "--checkpoint-every", "2",
        "--repo-url", "somebody/model", "--upload-interval", "1", folder=here,
    ) as monitor:  # fmt: skip
        host_port = monitor.wait_for("Running DHT root at 127.0.0.1:").split()[-1]
        multiaddr = monitor.wait_for("--initial_peers /ip4/127.0.0.1/tcp/").split()[-1]
        assert monitor.wait_for("--initial_peers 127.0.0.1:").split() == ["--initial_peers", host_port]
        join = ("--initial-peers", multiaddr)
        with running(
            "evaluate", "--initial-peers", host_port, "--client-mode", "--every", "2", "--max-evaluations", "3",
            "--text", str(text), "--device", "cpu", "--threads", "1", "--events", str(events),
        ) as evaluator:  # fmt: skip
            evaluator.wait_for("Waiting for a trainer")
            with (
                running(*trainer(text, *join, "--no-checkpoints", "--start-new")) as first,
                running(*trainer(text, *join, "--no-checkpoints", "--start-new")) as second,
            ):
                line = evaluator.wait_for("Held-out loss")
                assert "MLM accuracy" in line
                assert "SOP accuracy" in line
                assert evaluator.wait() == 0, evaluator.output
                for trainer_of_two in (first, second):
                    trainer_of_two.wait_for("Averaged tensors successfully with 2 peers")
                for _ in range(3):  # whole steps of both; a step that is over before the monitor looks has no line
                    monitor.wait_for("  loss = ")
                monitor.wait_for("Held-out loss")
                monitor.wait_for("Uploaded checkpoint-")
                second.interrupt()
                first.interrupt()
                for command in (first, second):
                    assert command.wait() == INTERRUPTED, command.output
        monitor.interrupt()
        assert monitor.wait() == INTERRUPTED, monitor.output
    assert "wandb sync" in monitor.output
    assert "tensorboard --logdir curves" in monitor.output
    assert "Traceback" not in monitor.output + evaluator.output


def check_curves(tmp_path: Path) -> None:
    here, events = tmp_path / "monitor", tmp_path / "evaluator.jsonl"
    measured = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["type"] for event in measured] == ["evaluated"] * 3
    assert all(after["step"] >= before["step"] + 2 for before, after in itertools.pairwise(measured))
    in_wandb, in_tensorboard = wandb_points(here), [point for _, point in tensorboard_points(here / "curves")]
    assert [point["step"] for point in in_wandb] == [point["step"] for point in in_tensorboard]
    for points in (in_wandb, in_tensorboard):
        steps = [point for point in points if point.keys() == STEP_FIELDS]
        assert len(steps) >= 2
        assert {point["alive peers"] for point in steps} >= {2}
        assert all(point["samples"] >= 64 for point in steps if point["alive peers"] == 2)
        heldout = {point["step"]: point for point in points if point.keys() == HELDOUT_FIELDS}
        assert heldout
        for event in measured:
            if event["step"] in heldout:
                assert heldout[event["step"]]["heldout loss"] == pytest.approx(event["heldout_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["monitor", "--refresh-period", "0"], "refresh_period is 0.0; it must be from 0.5 to 600 seconds"),
        (["monitor", "--wandb-project", ""], "--wandb-project is empty"),
        (["monitor", "--wandb-mode", "offline"], "name a project too: --wandb-project NAME"),
        (["monitor", "--trackio", " "], "--trackio is empty; name a project"),
        (["monitor", "--tensorboard", "/dev/null"], "/dev/null is not a folder that can be written"),
        (["monitor", "--checkpoint-dir", "/dev/null"], "checkpoint folder /dev/null"),
        (["monitor", "--checkpoint-dir", "d", "--checkpoint-every", "0"], '"0" for --checkpoint-every. Must be >= 1'),
        (["monitor", "--repo-url", "somebody/model"], "add for example: --checkpoint-dir checkpoints --repo-url"),
        (["monitor", "--checkpoint-dir", "d", "--repo-url", "a/b", "--upload-interval", "0"], "upload_interval is 0"),
        (["monitor", "--checkpoint-dir", "d", "--repo-url", "a/b"], "run: hf auth login"),
        (["monitor", "--checkpoint-dir", "d", "--repo-url", "a/b/c"], "for example OWNER/my-albert"),
        (["evaluate"], "--initial-peers HOST:PORT"),
        (["evaluate", "--initial-peers", "127.0.0.1:1", "--every", "0"], '"0" for --every. Must be >= 1'),
        (["evaluate", "--initial-peers", "127.0.0.1:1", "--text", "gone.txt"], "gone.txt"),
    ],
)
def test_a_monitor_refuses_options_that_cannot_work_and_leaves_no_file(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert run(arguments) == USAGE
    errors = capsys.readouterr().err
    assert said in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())
