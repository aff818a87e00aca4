"""Trainers that nobody can dial, as users start them: the tutorials' picture of free notebooks around one monitor."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.process.commands import LOOPBACK, address_of, running

pytestmark = pytest.mark.process

RUN = ("--run-id", "firewalled")
TINY = (
    "--vocab-size", "512", "--seq-length", "16", "--embedding-size", "16", "--hidden-size", "32",
    "--num-hidden-layers", "1", "--num-attention-heads", "2", "--intermediate-size", "32", "--num-heldout", "4",
    "--target-batch-size", "64", "--threads", "1",
)  # fmt: skip
NOTICE = "None of the 2 peers that train can be dialled"
MORE_STEPS = 3


def last_event(path: Path, kind: str) -> dict[str, object]:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if event["type"] == kind][-1]


@pytest.mark.long
def test_firewalled_trainers_wait_and_step_together_once_a_helper_can_be_dialled(tmp_path: Path) -> None:
    text, stop_file = tmp_path / "text", tmp_path / "stop"
    paragraphs = (f"Number {n} is here. After it comes number {n + 1}. That is all." for n in range(600))
    text.write_text("\n\n".join(paragraphs))
    with ExitStack() as stack:
        monitor = stack.enter_context(running("monitor", *RUN, "--listen", LOOPBACK))
        address = address_of(monitor)
        joining = ("train", *RUN, *TINY, "--initial-peers", address)
        slow = ("--batch-size", "4", "--slow-down", "20", "--text", str(text), "--stop-file", str(stop_file))
        trainers = [
            stack.enter_context(
                running(*joining, *slow, "--client-mode", "--events", str(tmp_path / name), "--linger-s", "30")
            )
            for name in ("one", "two")
        ]
        command = f"manyhands train --auxiliary {' '.join(RUN)} --initial-peers {address}"
        for trainer in trainers:
            line = trainer.wait_for(NOTICE)
            assert "are kept" in line, "theirs, or those of the first one, if it has made steps alone"
            assert line.rstrip().endswith(command)
        assert monitor.wait_for(NOTICE).rstrip().endswith(command)
        helper = stack.enter_context(
            running(*joining, "--auxiliary", "--listen", LOOPBACK)  # without the text
        )
        helper.wait_for("Helping run firewalled to average")
        last_step = int(helper.wait_for("] Step ").split()[-1]) + MORE_STEPS
        stop_file.write_text(str(last_step))
        for trainer in trainers:
            trainer.wait_for(f"Stopping at global step {last_step}")
        assert [trainer.wait() for trainer in trainers] == [0, 0]
        helper.wait_for(f"] Step {last_step}")
        for trainer in trainers:
            before, after = trainer.output.split(NOTICE, 1)
            assert "Averaged tensors successfully" not in before
            assert "makes global steps alone" not in after, "the first one may have, before it saw the second"
            assert "Averaged tensors successfully with 3 peers" in after
    finished = [last_event(tmp_path / name, "finished") for name in ("one", "two")]
    assert finished[0]["step"] == finished[1]["step"] == last_step
    assert finished[0]["state_digest"] == finished[1]["state_digest"]
