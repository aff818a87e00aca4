"""Prepared data as a trainer reads it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import datasets
import pytest
import torch

from manyhands.base.errors import ConfigError
from manyhands.cli.main import run
from manyhands.recipes.albert.batches import IGNORED, Batches, heldout_batch
from manyhands.recipes.albert.data.dataset import found_here, open_prepared
from manyhands.recipes.albert.data.preparation import Preparation
from manyhands.recipes.albert.data.prepare import prepare
from manyhands.recipes.albert.data.sample_files import SampleFiles
from manyhands.recipes.albert.data.samples import Samples, make_samples
from manyhands.recipes.albert.data.tokenizer import wrapped
from manyhands.recipes.albert.data.tokenizer_file import read_tokenizer, vocabulary_of
from manyhands.recipes.albert.fill import MaskFiller
from manyhands.recipes.albert.model import build_model, loss_of
from tests.unit.recipes.texts import write_book


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, bert_tokenizer: Path) -> Path:
    """Data whose tokenizer has other special tokens than ALBERT's."""
    folder = tmp_path_factory.mktemp("made")
    book = write_book(folder / "book.txt")
    settings = Preparation(
        text=(book,), tokenizer=str(bert_tokenizer), seq_length=512, num_proc=1, output=folder / "data"
    )
    return prepare(settings).folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "data"))


def opened(folder: Path):
    return open_prepared(folder / "albert_tokenized_wikitext", folder / "tokenizer")


@pytest.fixture
def prepared_samples(made: Path) -> Samples:
    prepared = opened(made)
    vocabulary = vocabulary_of(read_tokenizer(made / "tokenizer"))
    return Samples(training=prepared.training, heldout=prepared.heldout(12), vocabulary=vocabulary)


def rows(batch, start: int, end: int):
    return {name: tensor[start:end] for name, tensor in batch.items()}


def test_every_sample_is_what_was_saved(made):
    saved = datasets.load_from_disk(str(made / "albert_tokenized_wikitext"))
    prepared = opened(made)
    for split, samples in (("train", prepared.training), ("validation", prepared.validation)):
        assert len(samples) == len(saved[split])
        for row, sample in zip(saved[split], samples, strict=True):
            assert sample.input_ids.tolist() == row["input_ids"]
            assert sample.token_type_ids.tolist() == row["token_type_ids"]
            assert sample.special_tokens_mask.tolist() == row["special_tokens_mask"]
            assert sample.label == row["sentence_order_label"]
    assert prepared.settings() == {
        "seq_length": 512,
        "vocab_size": vocabulary_of(read_tokenizer(made / "tokenizer")).size,
    }


def test_batches_are_padded_to_their_longest_sample_and_know_the_tokens_of_their_tokenizer(prepared_samples, recipe):
    recipe = replace(recipe, seq_length=512, batch_size=2)
    vocabulary, lengths = prepared_samples.vocabulary, set()
    for batch in islice(Batches(prepared_samples, recipe, "peer"), 40):
        longest = int(batch["attention_mask"].sum(1).max())
        assert longest <= batch["input_ids"].shape[1] <= longest + 7
        assert (batch["input_ids"][batch["attention_mask"] == 0] == vocabulary.pad).all()
        assert (batch["input_ids"][:, 0] == vocabulary.cls).all()
        assert not torch.isin(batch["labels"], torch.tensor(sorted(vocabulary.special))).any()
        assert (batch["input_ids"][batch["labels"] != IGNORED] == vocabulary.mask).float().mean() > 0.5
        lengths.add(batch["input_ids"].shape[1])
    assert len(lengths) > 1
    assert next(Batches(prepared_samples, recipe, "trial", is_padded=True))["input_ids"].shape == (2, 512)


def test_each_peer_draws_every_sample_once_in_an_order_of_its_own(prepared_samples, recipe):
    number = len(prepared_samples.training)
    recipe = replace(recipe, seq_length=512, batch_size=number, mask_probability=0.01)
    orders = [next(Batches(prepared_samples, recipe, peer))["attention_mask"].sum(1).tolist() for peer in ("a", "b")]
    lengths = [len(sample.input_ids) for sample in prepared_samples.training]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(lengths)
    assert orders[0] != orders[1]
    assert orders[0] != lengths


@pytest.mark.parametrize("sizes", [(1, 5), (2, 4), (3, 3)])
def test_the_loss_of_samples_of_all_lengths_is_the_mean_of_its_parts(prepared_samples, recipe, sizes):
    recipe = replace(recipe, seq_length=512)
    vocabulary = prepared_samples.vocabulary
    model = build_model(recipe, vocabulary.size, vocabulary).double()
    by_length = sorted(prepared_samples.training, key=lambda sample: len(sample.input_ids))
    batch = heldout_batch(replace(prepared_samples, heldout=[*by_length[:3], *by_length[-3:]]), recipe)
    num_masked = (batch["labels"] != IGNORED).sum(1)
    assert num_masked.max() > 2 * num_masked.min()
    whole = loss_of(model, batch)
    first, second = sizes
    parts = loss_of(model, rows(batch, 0, first)), loss_of(model, rows(batch, first, first + second))
    assert ((parts[0] * first + parts[1] * second) / (first + second)).item() == pytest.approx(whole.item(), abs=1e-12)

    scores = model(**{name: value for name, value in batch.items() if "label" not in name}).prediction_logits
    of_tokens = torch.nn.functional.cross_entropy(scores.transpose(1, 2), batch["labels"], reduction="none")
    order_scores = model(**{name: value for name, value in batch.items() if "label" not in name}).sop_logits
    order_loss = torch.nn.functional.cross_entropy(order_scores, batch["sentence_order_label"])
    expected = (of_tokens.sum(1) / num_masked).mean() + order_loss
    assert whole.item() == pytest.approx(expected.item(), abs=1e-12)


def test_an_archive_of_hivemind_has_no_description_and_is_taken(copy):
    (copy / "manyhands.json").unlink()
    prepared = opened(copy)
    assert prepared.seq_length == 512
    assert prepared.digest == opened(copy).digest


@pytest.mark.parametrize("is_described", [True, False])
def test_another_tokenizer_is_refused(copy, tokenizer, tmp_path, is_described):
    tokenizer.save_pretrained(tmp_path / "other")
    if not is_described:
        (copy / "manyhands.json").unlink()
    with pytest.raises(ConfigError, match=r"other.*(is not the tokenizer that|) ?.*archive"):
        open_prepared(copy / "albert_tokenized_wikitext", tmp_path / "other")


def test_a_run_of_another_tokenizer_or_length_refuses_the_data_and_names_the_file(copy, recipe):
    prepared = opened(copy)
    assert prepared.digest is not None
    prepared.check_run("x", replace(recipe, seq_length=512), prepared.digest)
    with pytest.raises(
        ConfigError, match=r"tokenizer/tokenizer.json: tokenizer .* is not that of run 'x'.*began run .x."
    ):
        prepared.check_run("x", replace(recipe, seq_length=512), "0" * 64)
    with pytest.raises(ConfigError, match=r"up to 512 tokens, and run 'x' has samples of 128 .*--seq-length 128"):
        prepared.check_run("x", replace(recipe, seq_length=128), prepared.digest)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.7, 0.999])
def test_data_that_is_cut_off_is_refused(copy, kept):
    path = copy / "albert_tokenized_wikitext" / "train" / "data-00000-of-00001.arrow"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(
        ConfigError, match=r"data-00000-of-00001.arrow is truncated|it is truncated, or of other data"
    ) as raised:
        opened(copy)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("manyhands.json", "manyhands.json is damaged"),
        ("albert_tokenized_wikitext/train/state.json", "state.json cannot be read"),
        ("albert_tokenized_wikitext/train/data-00000-of-00001.arrow", "is truncated or damaged"),
        ("tokenizer/tokenizer.json", "tokenizer.json cannot be used"),
    ],
)
def test_damaged_files_are_named(copy, path, message):
    (copy / path).write_bytes(b'{"format": 1, "other": ' if path.endswith("json") else b"nonsense" * 100)
    with pytest.raises(ConfigError, match=message):
        opened(copy)


def test_a_newer_format_is_told_from_damage(copy):
    about = json.loads((copy / "manyhands.json").read_text())
    (copy / "manyhands.json").write_text(json.dumps({**about, "format": 2}))
    with pytest.raises(ConfigError, match="has format 2, and this version of manyhands reads format 1; update"):
        opened(copy)


def test_data_at_the_default_path_is_found_unless_a_text_is_named(copy, monkeypatch):
    monkeypatch.chdir(copy.parent)
    found = {"dataset_path": Path("data/albert_tokenized_wikitext"), "tokenizer": Path("data/tokenizer")}
    assert found_here({"seed": 1}) == {"seed": 1, **found}
    assert found_here({"text": (Path("a"),)}) == {"text": (Path("a"),)}
    assert found_here({"dataset_path": Path("elsewhere/samples")}) == {"dataset_path": Path("elsewhere/samples")}
    monkeypatch.chdir(copy)
    assert found_here({}) == {}


@pytest.mark.parametrize("tokenizer", [{}, {"tokenizer": Path("data/tokenizer/tokenizer.json")}])
def test_the_folder_of_data_prepare_and_the_file_of_a_tokenizer_are_understood(copy, monkeypatch, tokenizer):
    monkeypatch.chdir(copy.parent)
    found = {"dataset_path": Path("data/albert_tokenized_wikitext"), "tokenizer": Path("data/tokenizer")}
    assert found_here({"dataset_path": Path("data"), **tokenizer}) == found
    assert run(["data", "verify", "data/albert_tokenized_wikitext"]) == run(["data", "verify", "data"]) == 0
    settings = Preparation(text=(Path("a"),), tokenizer="data/tokenizer/tokenizer.json")
    assert settings.tokenizer_folder == Path("data/tokenizer")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--dataset-path", "missing"],
            "there is no folder missing (dataset_path); make the data with: manyhands data",
        ),
        (["--dataset-path", "data/tokenizer"], "has no state.json, so it is no prepared data"),
        (["--dataset-path", "data/albert_tokenized_wikitext", "--text", "a.txt"], "given together; give one of them"),
        (
            ["--seq-length", "128"],
            "--seq-length is 128, and the data on this machine needs 512; leave out --seq-length",
        ),
        (["--vocab-size", "5000"], "--vocab-size is 5000, and the data on this machine needs "),
        (["--tokenizer", "nowhere"], "tokenizer nowhere/tokenizer.json: No such file"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2(copy, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(copy.parent)
    assert run(["train", "--run-id", "x", "--listen", "127.0.0.1:0", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.splitlines()) == 1
    assert [path.name for path in Path().iterdir()] == ["data"], "it left something behind"


def test_a_file_that_is_no_longer_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.arrow is missing; get the data again"):
        SampleFiles([tmp_path / "gone.arrow"])


def test_text_is_trained_on_with_a_tokenizer_that_was_named_and_the_model_fills_masks(
    bert_tokenizer, documents, recipe, tmp_path
):
    tokenizer = wrapped(read_tokenizer(bert_tokenizer))
    recipe = replace(recipe, vocab_size=len(tokenizer), num_heldout=4)
    samples = make_samples(documents, tokenizer, recipe)
    model = build_model(recipe, len(tokenizer), samples.vocabulary)
    assert model.config.pad_token_id == samples.vocabulary.pad
    batch = next(Batches(samples, recipe, "peer"))
    assert (batch["input_ids"][:, 0] == 101).all()
    assert not torch.isin(batch["labels"], torch.tensor(sorted(samples.vocabulary.special))).any()
    loss_of(model, batch).backward()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    filled = MaskFiller(tmp_path).fill("the [MASK] of a model")
    assert "[MASK]" not in filled.text
