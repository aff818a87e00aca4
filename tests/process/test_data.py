"""Data is prepared once and trained on by several, as the tutorials have it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
from pathlib import Path

import psutil
import pytest

from manyhands.recipes.albert.data.tokenizer import train_tokenizer
from tests.process.commands import LOOPBACK, Command, running
from tests.unit.recipes.texts import BOOK, write_book
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[2] / "examples" / "albert" / "tokenize_wikitext103.py"
USAGE, INTERRUPTED = 2, 130
SMALL_DATA = ("--train-tokenizer", "--vocab-size", "600", "--seq-length", "32", "--num-proc", "2")
SMALL_MODEL = (
    "--hidden-size", "48", "--num-attention-heads", "3", "--intermediate-size", "64", "--num-hidden-layers", "1",
    "--learning-rate", "0.02", "--target-batch-size", "24",
)  # fmt: skip
COMMON = ("--listen", LOOPBACK, "--threads", "1")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the person who begins a run hosts."""
    folder = tmp_path_factory.mktemp("prepared")
    write_book(folder / "book.txt")
    command = Command(
        [str(SCRIPT), "--text", "book.txt", *SMALL_DATA, "--archive", "data.tar.gz"], module=None, folder=folder
    )
    try:
        assert command.wait() == 0, command.output
    finally:
        command.close()
    assert "SHA-256" in command.output
    return folder / "data.tar.gz"


def unpacked(archive: Path, folder: Path) -> Path:
    """``curl -L URL | tar xzf -`` beside the trainer."""
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder


def test_the_script_can_be_started_and_explains_itself() -> None:
    assert os.access(SCRIPT, os.X_OK)
    assert SCRIPT.read_text().startswith("#!/usr/bin/env python\n")
    command = Command([str(SCRIPT), "--help"], module=None)
    try:
        assert command.wait() == 0
    finally:
        command.close()
    assert "manyhands data prepare" in command.output
    assert "--train-tokenizer" in command.output


@pytest.mark.long
def test_trainers_find_the_unpacked_archive_and_newcomers_get_the_tokenizer(archive: Path, tmp_path: Path) -> None:
    first, second = (unpacked(archive, tmp_path / name) for name in ("first", "second"))
    shutil.rmtree(second / "data" / "tokenizer")
    with running("train", "--run-id", "x", *COMMON, *SMALL_MODEL, folder=first) as trainer:
        address = trainer.wait_for("Others can join through this peer").split()[-1]
        assert "samples in data/albert_tokenized_wikitext" in trainer.wait_for("Training on")
        assert "Training the tokenizer" not in trainer.output
        trainer.wait_for("Your current contribution")
        with running("join", address, *COMMON, folder=second) as newcomer:
            newcomer.wait_for("Training on")
            newcomer.wait_for("Averaged tensors successfully with 2 peers")


@pytest.mark.long
def test_data_of_another_tokenizer_is_refused_before_anything_is_loaded(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    small = ("--seq-length", "32", "--vocab-size", "600")
    with running("train", "--run-id", "x", *COMMON, *SMALL_MODEL, *small, folder=tmp_path / "first") as trainer:
        address = trainer.wait_for("Others can join through this peer").split()[-1]
        trainer.wait_for("Others can join this run with one word")
        folder = unpacked(archive, tmp_path / "second")
        own = ("--dataset-path", "data/albert_tokenized_wikitext")
        with running("join", address, *COMMON, *own, folder=folder) as newcomer:
            assert newcomer.wait() == USAGE
        line = newcomer.output.strip().splitlines()[-1]
        assert "data/tokenizer/tokenizer.json: tokenizer " in line
        assert "is not that of run 'x'" in line
        assert "comes with Python. As asked, this peer trains on other" in newcomer.output
        assert "Loading PyTorch" not in newcomer.output
        assert [path.name for path in folder.iterdir()] == ["data"]


@pytest.mark.long
def test_ctrl_c_ends_the_processes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    train_tokenizer(BOOK.documents, 600).save_pretrained(str(tmp_path / "tokenizer"))
    with (tmp_path / "long.txt").open("w") as long:
        for number in range(100_000):
            long.write(f"Sentence {number} is of no use. So is the next one, which comes after {number}.\n\n")
    arguments = ("--text", "long.txt", "--tokenizer", "tokenizer", "--num-proc", "2")
    command = Command([str(SCRIPT), *arguments], module=None, folder=tmp_path)
    try:
        wait_until((tmp_path / "data" / ".unfinished" / "train.arrow").exists, "the samples are being written")
        processes = command.descendants()
        command.interrupt()
        assert command.wait() == INTERRUPTED, command.output
        assert not psutil.wait_procs(processes, timeout=PATIENCE_S)[1], "processes are left"
    finally:
        command.close()
    assert "Traceback" not in command.output
    assert {path.name for path in (tmp_path / "data").iterdir()} <= {".prepare.lock"}


@pytest.mark.long
def test_shards_are_served_trained_on_and_evaluated_with(tmp_path: Path) -> None:
    write_book(tmp_path / "book.txt")
    command = Command([str(SCRIPT), "--text", "book.txt", *SMALL_DATA, "--shards", "3"], module=None, folder=tmp_path)
    try:
        assert command.wait() == 0, command.output
    finally:
        command.close()
    with running("data", "serve", "data/shards", "--listen", "127.0.0.1:0", folder=tmp_path) as server:
        url = server.wait_for("--dataset-url").split()[-1]
        (tmp_path / "trainer").mkdir()
        cache = ("--cache-dir", str(tmp_path / "cache"), "--cache-mb", "1")
        own = ("--state-dir", "kept", "--no-checkpoints")
        arguments = ("train", "--run-id", "x", *COMMON, *SMALL_MODEL, *cache, *own, "--dataset-url", url)
        with running(*arguments, folder=tmp_path / "trainer") as trainer:
            address = trainer.wait_for("Others can join through this peer").split()[-1]
            trainer.wait_for("Your current contribution")
            options = ("--cache-dir", str(tmp_path / "other"), "--max-evaluations", "1")
            with running("evaluate", "--initial-peers", address, *COMMON, *options) as evaluator:
                assert evaluator.wait() == 0, evaluator.output
            assert "which is not on this machine: fetching it from http://127.0.0.1" in evaluator.output
            assert re.search(r"Measuring on \d+ held-out samples in the shards of http://127.0.0.1", evaluator.output)
            assert "Held-out loss" in evaluator.output
            assert len(list((tmp_path / "other" / "1").glob("*.arrow"))) == 1, "only what is held out is fetched"
        assert re.search(r"Training on \d+ samples in the shards of http://127.0.0.1", trainer.output)
        assert "Training the tokenizer" not in trainer.output
        assert json.loads((tmp_path / "trainer" / "kept" / "stream.json").read_text())["shards_begun"] >= 1
        server.wait_for("127.0.0.1 fetches train-")
        server.interrupt()
        assert server.wait() == INTERRUPTED
        assert "Traceback" not in server.output


@pytest.mark.long
def test_an_archive_is_named_by_its_address(archive: Path, tmp_path: Path) -> None:
    cache = ("--dataset-url", archive.as_uri(), "--cache-dir", "cache", "--no-checkpoints", "--max-steps", "1")
    for _ in range(2):
        with running("train", "--run-id", "x", *COMMON, *SMALL_MODEL, *cache, folder=tmp_path) as trainer:
            assert trainer.wait() == 0, trainer.output
            assert "samples in cache/archives/" in trainer.output
        archive = archive.rename(archive.with_name("gone"))  # the second start needs it no more
    archive.rename(archive.with_name("data.tar.gz"))
