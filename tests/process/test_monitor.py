"""A run as the tutorials have it: a monitor with curves that keeps the state, trainers, and an evaluator."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.process.commands import LOOPBACK, running
from tests.unit.monitor.curve_files import tensorboard_points, wandb_points

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


@pytest.mark.timeout(300)
def test_a_run_is_drawn_and_evaluated(text: Path, tmp_path: Path) -> None:
    here = tmp_path / "monitor"
    here.mkdir()
    events = tmp_path / "evaluator.jsonl"
    with running(
        "monitor", "--run-id", "seen", "--listen", LOOPBACK, "--wandb-project", "demo", "--wandb-mode", "offline",
        "--tensorboard", "curves", folder=here,
    ) as monitor:  # fmt: skip
        host_port = monitor.wait_for("Running DHT root at 127.0.0.1:").split()[-1]
        multiaddr = monitor.wait_for("--initial_peers /ip4/127.0.0.1/tcp/").split()[-1]
        assert monitor.wait_for("--initial_peers 127.0.0.1:").split() == ["--initial_peers", host_port]
        join = ("--initial-peers", multiaddr)
        with running(
            "evaluate", "--initial-peers", host_port, "--client-mode", "--every", "2", "--max-evaluations", "3",
            "--text", str(text), "--device", "cpu", "--threads", "1", "--events", str(events),
        ) as evaluator:  # fmt: skip
            evaluator.wait_for("Waiting for somebody who trains")
            with (
                running(*trainer(text, *join, "--no-checkpoints", "--start-new")) as first,
                running(*trainer(text, *join, "--no-checkpoints", "--start-new")) as second,
            ):
                line = evaluator.wait_for("Held-out loss")
                assert "MLM accuracy" in line
                assert "SOP accuracy" in line
                assert evaluator.wait(90) == 0, evaluator.output
                monitor.wait_for("Step #3  loss = ")
                monitor.wait_for("Held-out loss")
                second.interrupt()
                first.interrupt()
                for command in (first, second):
                    assert command.wait(15) == INTERRUPTED, command.output
        monitor.interrupt()
        assert monitor.wait(20) == INTERRUPTED, monitor.output
    assert "wandb sync" in monitor.output
    assert "tensorboard --logdir curves" in monitor.output
    assert "Traceback" not in monitor.output + evaluator.output

    measured = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["type"] for event in measured] == ["evaluated"] * 3
    assert all(after["step"] >= before["step"] + 2 for before, after in zip(measured, measured[1:], strict=False))
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
