"""A trainer that is stopped goes on from where it was, and what it leaves is a model that transformers loads."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

from manyhands.cli.main import run
from tests.process.commands import LOOPBACK, running

pytestmark = pytest.mark.process

FAILED = 1
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
        assert first.wait() == 0, first.output
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]

    with running(*arguments(folder, "--any-text")) as second:  # with the tokenizer that was saved
        second.wait_for(f"Going on from {folder / 'checkpoint-5'}")
        second.wait_for("[INFO] Step 6")
        second.interrupt()
        assert second.wait() == INTERRUPTED, second.output
    (step,) = re.findall(r"Saving a checkpoint at global step (\d+)", second.output)

    with running(*arguments(folder, "--any-text", "--max-steps", step)) as third:
        assert third.wait() == 0, third.output
    assert f"Going on from {folder / f'checkpoint-{step}'}" in third.output

    model = transformers.AlbertForPreTraining.from_pretrained(folder / f"checkpoint-{step}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / f"checkpoint-{step}")
    assert model(**tokenizer("a text", return_tensors="pt")).prediction_logits.shape[-1] == len(tokenizer)

    assert run(["checkpoint", "verify", str(folder)]) == 0
    assert run(["checkpoint", "export", str(folder), "--to", str(tmp_path / "out")]) == 0
    exported = transformers.AutoModel.from_pretrained(tmp_path / "out")
    assert torch.equal(exported.embeddings.word_embeddings.weight, model.albert.embeddings.word_embeddings.weight)
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "out")) == len(tokenizer)
    assert not list((tmp_path / "out").glob("optimizer*"))


def losses_in(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"Local loss: ([0-9.]+)", output)]


@pytest.mark.long
def test_trainers_that_were_all_killed_go_on_and_the_loss_goes_on_falling(tmp_path: Path) -> None:
    """One of them finds its newest checkpoint torn, and uses the one before it."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Sentence number {n} is here. Another one is behind it.\n\n" for n in range(4000)))
    folders = [tmp_path / "first", tmp_path / "second"]
    more = ("--text", str(text), "--checkpoint-every", "2")
    with running(*arguments(folders[0], *more)) as first:
        address = first.wait_for("Others can join through this peer").split("--initial-peers ")[1].split()[0]
        with running(*arguments(folders[1], *more, "--initial-peers", address)) as second:
            for _ in range(5):
                second.wait_for("Saving a checkpoint")
            second.wait_for("Local loss")
            for trainer in (first, second):
                trainer.kill()
            for trainer in (first, second):
                trainer.wait()
    before = losses_in(first.output)
    *_, older, newest = sorted(folders[0].glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    torn = newest / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])

    with running(*arguments(folders[0], *more)) as first:
        address = first.wait_for("Others can join through this peer").split("--initial-peers ")[1].split()[0]
        first.wait_for(f"{newest} is damaged (model.safetensors has ")
        first.wait_for(f"Going on from {older}")
        with running(*arguments(folders[1], *more, "--initial-peers", address)) as second:
            for trainer in (second, first):
                for _ in range(60):
                    trainer.wait_for("Local loss")
    for trainer in (first, second):
        after = losses_in(trainer.output)
        assert after[0] < before[0] - 0.5, "it did not begin anew"
        assert sum(after[-5:]) < sum(before[-5:]), "and the loss went on falling"
        assert "Traceback" not in trainer.output


@pytest.mark.long
def test_checkpoints_of_other_settings_runs_formats_or_damaged_ones_are_refused(tmp_path: Path) -> None:
    with running(*arguments(tmp_path, "--max-steps", "2", "--checkpoint-every", "1")) as first:
        assert first.wait() == 0, first.output
    with running(*arguments(tmp_path, "--learning-rate", "0.001")) as other:
        assert other.wait() == USAGE
    assert "learning_rate is 0.001 here, 0.01 in the checkpoint" in other.output.strip().splitlines()[-1]

    with running(*arguments(tmp_path, "--embedding-size", "32")) as other:
        assert other.wait() == USAGE
    assert "embedding_size is 32 here, 128 in the checkpoint" in other.output.strip().splitlines()[-1]

    with running("train", "--run-id", "other", *arguments(tmp_path)[3:]) as other:
        assert other.wait() == USAGE
    assert "checkpoint-2 is of run 'kept', and this is 'other'" in other.output.strip().splitlines()[-1]

    about = tmp_path / "checkpoint-2" / "run.json"
    before = about.read_text()
    about.write_text(before.replace('"format": 2', '"format": 3'))
    with running(*arguments(tmp_path)) as newer:
        assert newer.wait() == USAGE
    assert "checkpoint-2 has format 3, and this version reads format 2" in newer.output.strip().splitlines()[-1]
    about.write_text(before)

    for name in ("checkpoint-1/model.safetensors", "checkpoint-2/optimizer.safetensors"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:1000])
    with running(*arguments(tmp_path)) as damaged:
        assert damaged.wait() == USAGE
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
            assert trainer.wait() == FAILED, trainer.output
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for step in (1, 2, 3):
        assert f"The checkpoint of step {step} was not saved" in trainer.output
    assert f"the model of step 3 was not saved in {tmp_path}" in trainer.output.splitlines()[-1]
    assert not list(tmp_path.glob("checkpoint-*"))
    assert "Traceback" not in trainer.output
