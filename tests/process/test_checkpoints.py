"""A trainer that is stopped goes on from where it was, and what it leaves is a model that transformers loads."""

from __future__ import annotations

import re
import sys
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


@pytest.mark.long
def test_a_trainer_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    folder, text = tmp_path / "checkpoints", tmp_path / "text.txt"
    text.write_text("".join(f"Sentence number {n} is here. Another one is behind it.\n\n" for n in range(4000)))
    with running(*arguments(folder, "--checkpoint-every", "2", "--max-steps", "5", "--text", str(text))) as first:
        assert first.wait(90) == 0, first.output
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]

    with running(*arguments(folder)) as second:  # on another text, with the tokenizer that was saved
        second.wait_for(f"Going on from {folder / 'checkpoint-5'}")
        second.wait_for("[INFO] Step 6")
        second.interrupt()
        assert second.wait(10) == INTERRUPTED, second.output
    (step,) = re.findall(r"Saving a checkpoint at global step (\d+)", second.output)

    with running(*arguments(folder, "--max-steps", step)) as third:
        assert third.wait(90) == 0, third.output
    assert f"Going on from {folder / f'checkpoint-{step}'}" in third.output

    model = transformers.AlbertForPreTraining.from_pretrained(folder / f"checkpoint-{step}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / f"checkpoint-{step}")
    assert model(**tokenizer("a text", return_tensors="pt")).prediction_logits.shape[-1] == len(tokenizer)


@pytest.mark.long
def test_what_cannot_be_gone_on_from_is_said(tmp_path: Path) -> None:
    with running(*arguments(tmp_path, "--max-steps", "2", "--checkpoint-every", "1")) as first:
        assert first.wait(90) == 0, first.output
    with running(*arguments(tmp_path, "--learning-rate", "0.001")) as other:
        assert other.wait(60) == USAGE
    assert "learning_rate is 0.001 here, 0.01 in the checkpoint" in other.output.strip().splitlines()[-1]

    with running(*arguments(tmp_path, "--embedding-size", "32")) as other:
        assert other.wait(60) == USAGE
    assert "embedding_size is 32 here, 128 in the checkpoint" in other.output.strip().splitlines()[-1]

    for name in ("checkpoint-1/model.safetensors", "checkpoint-2/optimizer.safetensors"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:1000])
    with running(*arguments(tmp_path)) as damaged:
        assert damaged.wait(60) == USAGE
    assert "checkpoint-2 is damaged (optimizer.safetensors has 1000 bytes instead of " in damaged.output
    assert "checkpoint-1 is damaged (model.safetensors has 1000 bytes instead of " in damaged.output
    assert f"no checkpoint in {tmp_path} can be read" in damaged.output.strip().splitlines()[-1]


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="no such limit there")
def test_a_disk_that_is_full_does_not_stop_the_training(tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with running(*arguments(tmp_path, "--max-steps", "3", "--checkpoint-every", "1")) as trainer:
            assert trainer.wait(90) == 0, trainer.output
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for step in (1, 2, 3):
        assert f"the checkpoint of step {step} was not saved" in trainer.output
    assert not list(tmp_path.glob("checkpoint-*"))
    assert "Traceback" not in trainer.output
