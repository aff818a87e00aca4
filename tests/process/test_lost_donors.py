"""The only trainer of a run ends while another machine downloads the model from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.commands import LOOPBACK, Command, running

pytestmark = [pytest.mark.process, pytest.mark.long]

USAGE = 2
INTERRUPTED = 130


@contextmanager
def download(folder: Path, up_mbit_s: str) -> Iterator[tuple[Command, Command]]:
    """A trainer with a slow uplink, and a newcomer that has begun to download its state of 4 MB."""
    small = (
        "--hidden-size", "64", "--num-attention-heads", "2", "--intermediate-size", "64", "--num-hidden-layers", "1",
        "--seq-length", "32", "--vocab-size", "2000", "--batch-size", "8", "--target-batch-size", "32",
    )  # fmt: skip
    with running(
        "train", "--run-id", "lost", "--listen", LOOPBACK, "--threads", "1", *small,
        "--checkpoint-dir", str(folder), "--max-upload-mbit-s", up_mbit_s,
    ) as trainer:  # fmt: skip
        address = trainer.wait_for("Others can join through this peer").split("--initial-peers ")[1].split()[0]
        trainer.wait_for("Step 3")
        with running("join", address, "--listen", LOOPBACK, "--threads", "1", "--batch-size", "8") as newcomer:
            trainer.wait_for("downloads the state")
            yield trainer, newcomer


def test_a_newcomer_whose_donor_is_killed_ends_with_what_to_do_and_begins_nothing(tmp_path: Path) -> None:
    with download(tmp_path / "kept", "0.5") as (trainer, newcomer):
        trainer.kill()
        assert newcomer.wait() == USAGE, newcomer.output
        assert "If a peer has a checkpoint of the run, start that one" in newcomer.output.splitlines()[-1]
        assert "alone" not in newcomer.output


def test_a_donor_that_is_told_to_end_stays_for_a_download_says_so_and_the_newcomer_goes_on(tmp_path: Path) -> None:
    with download(tmp_path / "kept", "4") as (trainer, newcomer):
        trainer.terminate()
        trainer.wait_for("downloads the state from this one: leaving when it has it")
        assert trainer.wait() == INTERRUPTED, trainer.output
        newcomer.wait_for("Received the state of step")
        newcomer.wait_for("this peer makes global steps alone, from #")
