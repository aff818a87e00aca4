"""A trainer that is stopped goes on from where it was, and what it leaves is a model that transformers loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from tests.process.commands import LOOPBACK, running

pytestmark = pytest.mark.process

USAGE = 2
INTERRUPTED = 130


def arguments(folder: Path, *more: str) -> tuple[str, ...]:
    return (
        "train", "--run-id", "kept", "--listen", LOOPBACK, "--threads", "1", "--target-batch-size", "16",
        "--batch-size", "8", "--hidden-size", "64", "--intermediate-size", "64", "--checkpoint-dir", str(folder), *more,
    )  # fmt: skip


def test_a_trainer_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with running(*arguments(folder, "--checkpoint-every", "2", "--max-steps", "5")) as first:
        assert first.wait(90) == 0, first.output
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]

    with running(*arguments(folder)) as second:
        second.wait_for(f"Going on from {folder / 'checkpoint-5'}")
        second.wait_for("[INFO] Step 6")
        second.interrupt()
        assert second.wait(10) == INTERRUPTED, second.output
    (step,) = re.findall(r"Saved a checkpoint at global step (\d+)", second.output)

    with running(*arguments(folder, "--max-steps", step)) as third:
        assert third.wait(90) == 0, third.output
    assert f"Going on from {folder / f'checkpoint-{step}'}" in third.output

    model = transformers.AlbertForPreTraining.from_pretrained(folder / f"checkpoint-{step}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / f"checkpoint-{step}")
    assert model(**tokenizer("a text", return_tensors="pt")).prediction_logits.shape[-1] == len(tokenizer)


def test_a_checkpoint_that_is_damaged_or_of_another_model_is_one_line(tmp_path: Path) -> None:
    with running(*arguments(tmp_path, "--max-steps", "1")) as first:
        assert first.wait(90) == 0, first.output
    with running(*arguments(tmp_path, "--embedding-size", "32")) as other:
        assert other.wait(60) == USAGE
    assert "size mismatch" in other.output.strip().splitlines()[-1]
    optimizer = tmp_path / "checkpoint-1" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:1000])
    with running(*arguments(tmp_path)) as damaged:
        assert damaged.wait(60) == USAGE
    assert f"checkpoint {tmp_path / 'checkpoint-1'} cannot be loaded: " in damaged.output.strip().splitlines()[-1]
