"""A trainer of several processes, one for each GPU, is one peer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.commands import LOOPBACK, Command

pytestmark = pytest.mark.process

BATCH_SIZE, NUM_RANKS, USAGE = 8, 2, 2
TORCHRUN = ("--standalone", "--nproc-per-node", str(NUM_RANKS), "-m", "manyhands")
SMALL = (
    "train", "--run-id", "ranks", "--listen", LOOPBACK, "--threads", "1", "--device", "cpu", "--hidden-size", "32",
    "--num-hidden-layers", "1", "--intermediate-size", "32", "--embedding-size", "16", "--vocab-size", "512",
    "--seq-length", "16", "--target-batch-size", "64", "--batch-size", str(BATCH_SIZE), "--linger-s", "0",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("mode", [(), ("--local-steps",)], ids=["synchronous", "local steps"])
def test_the_ranks_of_torchrun_are_one_peer_that_goes_on_from_its_checkpoint(
    mode: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "small.txt").write_text(
        "\n\n".join(f"Sentence {n} is short. It ends here. So does it." for n in range(300))
    )
    arguments = (*SMALL, *mode, "--text", "small.txt", "--checkpoint-dir", "kept")
    for max_steps in (2, 3):
        events = tmp_path / f"events-{max_steps}"
        more = ("--max-steps", str(max_steps), "--events", str(events))
        job = Command([*TORCHRUN, *arguments, *more], "torch.distributed.run", tmp_path)
        try:
            assert job.wait() == 0, job.output
        finally:
            job.close()
        assert job.output.count("Computing on cpu") == 1, "rank 0 alone speaks"
        told = [json.loads(line) for line in events.read_text().splitlines()]
        num_batches = sum(event["type"] == "batch" for event in told)
        assert told[-1]["counts"]["samples_computed"] == NUM_RANKS * BATCH_SIZE * num_batches
        assert told[-1]["step"] == max_steps
    assert "Going on from" in job.output


@pytest.mark.parametrize(
    "option",
    [
        ("--stop-file", "stop"),
        pytest.param(("--auxiliary", "--initial-peers", "127.0.0.1:1"), marks=pytest.mark.long),
    ],
)
def test_options_for_one_process_are_refused_under_torchrun(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    command = Command([*SMALL, *option])
    try:
        assert command.wait() == USAGE
    finally:
        command.close()
    assert "torchrun" in command.output
    assert len(command.output.strip().splitlines()) == 1, command.output
