"""Trainers that train alone between two averages, as users start them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.process.commands import LOOPBACK, running

pytestmark = pytest.mark.process

USAGE = 2
TINY = (
    "--vocab-size", "512", "--seq-length", "16", "--embedding-size", "16", "--hidden-size", "32",
    "--num-hidden-layers", "1", "--num-attention-heads", "2", "--intermediate-size", "32", "--num-heldout", "16",
    "--learning-rate", "0.003",
)  # fmt: skip
COMMON = ("--run-id", "local", "--threads", "1", "--listen", LOOPBACK)
NUM_STEPS = 24
MORE_STEPS = 8
"""After the one that was evaluated, which is not the last one any more."""


def write_text(path: Path) -> Path:
    paragraphs = (f"Number {n} is here. After it comes number {n + 1}. That is all." for n in range(600))
    path.write_text("\n\n".join(paragraphs))
    return path


def events_of(path: Path, kind: str) -> list[dict[str, object]]:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if event["type"] == kind]


@pytest.mark.long
def test_two_trainers_lower_the_held_out_loss_and_agree(tmp_path: Path) -> None:
    text, stop_file = str(write_text(tmp_path / "text")), str(tmp_path / "stop")
    own = ("--text", text, "--batch-size", "4", "--slow-down", "3", "--stop-file", stop_file)
    with ExitStack() as stack:
        begin = ("train", *COMMON, *TINY, *own, "--local-steps", "--target-batch-size", "256")
        first = stack.enter_context(running(*begin, "--events", str(tmp_path / "one")))
        address = first.wait_for("Others can join through this peer").split()[-1]
        first.wait_for("manyhands join mh1")
        join = ("train", *COMMON, *own, "--initial-peers", address)  # it takes over that steps are local
        second = stack.enter_context(running(*join, "--events", str(tmp_path / "two")))
        evaluate = ("evaluate", "--run-id", "local", "--initial-peers", address, "--text", text, "--every", "1")
        evaluator = stack.enter_context(running(*evaluate, "--events", str(tmp_path / "evaluator")))
        second.wait_for("Averaged tensors successfully with 2 peers")
        step = int(evaluator.wait_for("Held-out loss").split()[-1])
        last_step = max(NUM_STEPS, step + MORE_STEPS)
        (tmp_path / "stop").write_text(str(last_step))
        assert [trainer.wait() for trainer in (first, second)] == [0, 0]
    joined = [events_of(tmp_path / name, "joined")[0] for name in ("one", "two")]
    finished = [events_of(tmp_path / name, "finished")[-1] for name in ("one", "two")]
    assert finished[0]["step"] == finished[1]["step"] == last_step
    assert finished[0]["state_digest"] == finished[1]["state_digest"]
    assert finished[0]["heldout_loss"] == pytest.approx(finished[1]["heldout_loss"], abs=1e-4), "of the agreed model"
    assert float(str(finished[0]["heldout_loss"])) < float(str(joined[0]["heldout_loss"])) - 0.1
    for last in finished:
        counts = last["counts"]
        assert isinstance(counts, dict)
        assert counts["rounds_committed"] > 2
        assert counts["samples_used"] > 0


@pytest.mark.long
def test_a_target_below_one_batch_of_every_trainer_is_one_line(tmp_path: Path) -> None:
    text = str(write_text(tmp_path / "text"))
    begin = ("train", *COMMON, *TINY, "--text", text, "--batch-size", "8", "--local-steps", "--target-batch-size", "12")
    with running(*begin) as first:
        address = first.wait_for("Others can join through this peer").split()[-1]
        first.wait_for("manyhands join mh1")
        join = ("train", *COMMON, "--initial-peers", address, "--text", text)
        with running(*join, "--batch-size", "8") as second:
            assert second.wait() == USAGE
        line = second.output.strip().splitlines()[-1]
        assert "target_batch_size=12 is below one batch of 8 samples for each of the 2 peers" in line
        assert "batches of 6 here" in line
