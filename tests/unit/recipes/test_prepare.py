"""Prepared data: what is made of a text, and that it is the same whatever makes it."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import sys
import tarfile
import threading
import types
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import transformers
from huggingface_hub import constants

from manyhands.base.digests import sha256_of
from manyhands.base.errors import ConfigError
from manyhands.cli.main import run
from manyhands.recipes.albert.data.corpus import load_documents
from manyhands.recipes.albert.data.dataset import INDEX, open_prepared
from manyhands.recipes.albert.data.preparation import Preparation
from manyhands.recipes.albert.data.prepare import Result, prepare
from manyhands.recipes.albert.data.sample_files import SampleFiles
from manyhands.recipes.albert.data.tokenizer import wrapped
from manyhands.recipes.albert.data.tokenizer_file import digest_of_json, read_tokenizer
from tests.sweeps import few_of
from tests.unit.recipes.texts import BOOK, write_book

COLUMNS = ["attention_mask", "input_ids", "sentence_order_label", "special_tokens_mask", "token_type_ids"]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_book(tmp_path_factory.mktemp("text") / "book.txt")


def settings_for(book: Path, folder: Path, **changes) -> Preparation:
    small = {"vocab_size": 600, "seq_length": 64, "num_proc": 1, "train_tokenizer": True, "text": (book,)}
    return Preparation(**{**small, "output": folder / "data", **changes})


@pytest.fixture(scope="module")
def made(book: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("made")
    return prepare(settings_for(book, folder, shards=3, archive=folder / "data.tar.gz"))


def samples_of(folder: Path) -> dict[str, list[dict]]:
    splits = datasets.load_from_disk(str(folder / "albert_tokenized_wikitext"))
    return {split: list(rows) for split, rows in splits.items()}


def sentence_numbers(row: dict, tokenizer: transformers.PreTrainedTokenizerFast) -> list[int]:
    """Of the sentences that begin in a sample, in the order that they have in the text."""
    end = row["input_ids"].index(tokenizer.sep_token_id)
    texts = [
        tokenizer.decode(ids, skip_special_tokens=True) for ids in (row["input_ids"][:end], row["input_ids"][end:])
    ]
    words = [text.split()[:-1] for text in texts]  # the last one may have been cut
    in_text = chain.from_iterable(reversed(words) if row["sentence_order_label"] else words)
    return [int(word[1:]) for word in in_text if re.fullmatch(r"s\d+", word)]


def test_datasets_reads_the_columns_that_hivemind_has(made):
    splits = datasets.load_from_disk(str(made.folder / "albert_tokenized_wikitext"))
    assert sorted(splits) == ["train", "validation"]
    for split, rows in splits.items():
        assert sorted(rows.column_names) == COLUMNS
        assert len(rows) == made.about.num_samples[split]
        for row in rows:
            length = len(row["input_ids"])
            assert length <= 64
            assert [len(row[name]) for name in COLUMNS if name != "sentence_order_label"] == [length] * 4
            assert row["attention_mask"] == [1] * length


def test_half_of_the_pairs_are_swapped_and_none_crosses_a_document(made):
    tokenizer = wrapped(read_tokenizer(made.folder / "tokenizer"))
    labels: Counter[int] = Counter()
    for row in chain.from_iterable(samples_of(made.folder).values()):
        numbers = sentence_numbers(row, tokenizer)
        assert numbers == sorted(numbers), "the label does not say in which order the segments are in the text"
        assert len({BOOK.document_of[number] for number in numbers}) == 1
        labels[row["sentence_order_label"]] += 1
    assert abs(labels[0] - labels[1]) < 4 * sum(labels.values()) ** 0.5 / 2 + 1, labels


@pytest.mark.parametrize("kind", few_of(["trained", "bert", "albert"], 1, pytest.mark.long))
def test_samples_are_what_encoding_the_text_of_each_pair_gives(made, book, tmp_path, kind, request):
    """The slow way, sentence by sentence and pair by pair, as the example of hivemind does it."""
    folder = made.folder
    if kind != "trained":
        published = request.getfixturevalue(f"{kind}_tokenizer")
        folder = prepare(settings_for(book, tmp_path, train_tokenizer=False, tokenizer=str(published))).folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    expected: dict[str, list[dict]] = {"train": [], "validation": []}
    numbers: Counter[str] = Counter()
    for index, sentences in enumerate(load_documents([book])):
        split = "validation" if index % 50 == 1 else "train"
        rng = random.Random(f"pairs 0 {split} {numbers[split]}")
        numbers[split] += 1
        expected[split] += slowly_made(sentences, tokenizer, rng)
    assert samples_of(folder) == expected


def slowly_made(sentences: list[str], tokenizer, rng: random.Random) -> list[dict]:
    rows, gathered, num_tokens = [], [], 0
    for position, sentence in enumerate(sentences):
        gathered.append(sentence)
        num_tokens += len(tokenizer.tokenize(sentence))
        if position < len(sentences) - 1 and num_tokens < 64:
            continue
        if len(gathered) > 1:
            cut = rng.randrange(1, len(gathered))
            pair = [" ".join(gathered[:cut]), " ".join(gathered[cut:])]
            is_swapped = rng.random() < 0.5
            encoded = tokenizer(
                *(reversed(pair) if is_swapped else pair), truncation="longest_first", max_length=64,
                return_special_tokens_mask=True, return_token_type_ids=True,
            )  # fmt: skip
            rows.append({**encoded, "sentence_order_label": int(is_swapped)})
        gathered, num_tokens = [], 0
    return rows


@pytest.mark.long
def test_the_number_of_processes_changes_nothing(made, book, tmp_path, monkeypatch):
    monkeypatch.setattr("manyhands.recipes.albert.data.prepare.CHUNK_CHARS", 9_000)  # many chunks
    other = prepare(settings_for(book, tmp_path, shards=3, num_proc=3))
    assert other.about == made.about
    assert samples_of(other.folder) == samples_of(made.folder)
    assert (other.folder / "shards" / INDEX).read_bytes() == (made.folder / "shards" / INDEX).read_bytes()


def test_another_seed_cuts_and_swaps_elsewhere(made, book, tmp_path):
    other = prepare(settings_for(book, tmp_path, seed=1))
    assert other.about.tokenizer == made.about.tokenizer
    assert samples_of(other.folder)["train"] != samples_of(made.folder)["train"]


def test_the_shards_are_the_samples_in_files_of_about_equal_size(made):
    folder = made.folder / "shards"
    index = json.loads((folder / INDEX).read_text())
    assert index["about"] == json.loads((made.folder / "manyhands.json").read_text())
    assert len(index["train"]) == 3
    sizes = [shard["num_bytes"] for shard in index["train"]]
    assert max(sizes) < 1.3 * min(sizes)
    for shard in [index["tokenizer"], *index["train"], *index["validation"]]:
        path = folder / shard["name"]
        assert (path.stat().st_size, sha256_of(path)) == (shard["num_bytes"], shard["sha256"])
    for split in ("train", "validation"):
        files = SampleFiles(folder / shard["name"] for shard in index[split])
        assert [sample.input_ids.tolist() for sample in files] == [
            row["input_ids"] for row in samples_of(made.folder)[split]
        ]
        assert sum(shard["num_samples"] for shard in index[split]) == len(files)
    assert digest_of_json((folder / "tokenizer.json").read_text()) == made.about.tokenizer


def test_the_same_text_makes_the_same_archive(made, book, tmp_path):
    """So mirrors can make their own; each had another file, as its samples were named after a temporary folder."""
    again = tmp_path / "data.tar.gz"
    prepare(settings_for(book, tmp_path, archive=again))
    assert again.read_bytes() == (made.folder.parent / "data.tar.gz").read_bytes()


def test_an_archive_is_found_at_the_default_paths_once_it_is_unpacked(made, tmp_path):
    path = made.folder.parent / "data.tar.gz"
    assert sha256_of(path) == made.sha256
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    prepared = open_prepared(tmp_path / "data" / "albert_tokenized_wikitext", tmp_path / "data" / "tokenizer")
    assert len(prepared.training) == made.about.num_samples["train"]
    assert prepared.digest == made.about.tokenizer


def test_an_interrupted_preparation_leaves_nothing_behind(book, tmp_path, monkeypatch):
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("manyhands.recipes.albert.data.prepare.write_archive", interrupt)  # the last thing it does
    with pytest.raises(KeyboardInterrupt):
        prepare(settings_for(book, tmp_path, shards=2, archive=tmp_path / "data.tar"))
    assert [path.name for path in tmp_path.rglob("*")] in (["data"], ["data", ".prepare.lock"])
    monkeypatch.undo()
    prepare(settings_for(book, tmp_path, archive=tmp_path / "data.tar"))


@pytest.fixture
def closed_hub(monkeypatch):
    """A hub that closes each connection; counts them."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    num_asked = []
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = hub.accept()
                    num_asked.append(1)  # before the caller sees the end
                    connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield num_asked
        hub.shutdown(socket.SHUT_RDWR)
        thread.join(10.0)


@pytest.mark.parametrize("missing", [{"text": ()}, {"tokenizer": "some/tokenizer", "train_tokenizer": False}])
def test_a_hub_that_does_not_answer_is_asked_once_and_said_at_once(closed_hub, book, tmp_path, caplog, missing):
    with pytest.raises(ConfigError, match=r"It needs huggingface\.co, or a folder with"):
        prepare(settings_for(book, tmp_path, **{"train_tokenizer": True} | missing))
    assert len(closed_hub) == 1
    assert "does not answer" in caplog.text


@pytest.fixture
def datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("datasets_cache")
def test_a_data_set_of_lines_has_its_own_validation_split(book, tmp_path):
    """As WikiText-103 is: each line is a document, empty lines and single sentences are none."""
    lines = {
        "train": ["", " = Title = \n", *(" ".join(document) for document in BOOK.documents[:40]), "Only one."],
        "validation": [" ".join(document) for document in BOOK.documents[40:44]],
        "test": ["Not to be looked at. Not even this."],
    }
    for split, texts in lines.items():
        table = pyarrow.table({"text": texts})
        (tmp_path / "wiki").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(table, tmp_path / "wiki" / f"{split}-00000-of-00001.parquet")
    result = prepare(settings_for(book, tmp_path, text=(), dataset=str(tmp_path / "wiki")))
    assert result.about.source == str(tmp_path / "wiki")
    tokenizer = wrapped(read_tokenizer(result.folder / "tokenizer"))
    for split, of_split in samples_of(result.folder).items():
        found = {number for row in of_split for number in sentence_numbers(row, tokenizer)}
        assert found
        assert found <= {int(number) for text in lines[split] for number in re.findall(r"S(\d+) ", text)}

    gathered = prepare(settings_for(book, tmp_path / "b", text=(), dataset=str(tmp_path / "wiki"), rows_per_document=4))
    assert sum(gathered.about.num_samples.values()) < sum(result.about.num_samples.values())


def test_a_tokenizer_that_does_not_encode_words_by_themselves_is_refused(made, book, tmp_path):
    description = json.loads((made.folder / "tokenizer" / "tokenizer.json").read_text())
    description["pre_tokenizer"] = None  # words run into each other
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(ConfigError, match=r"must encode them as \[CLS\] A \[SEP\] B \[SEP\].*words by themselves"):
        prepare(settings_for(book, tmp_path, train_tokenizer=False, tokenizer=str(tmp_path)))


def test_punkt_splits_where_it_is_installed(book, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nltk", None)
    with pytest.raises(ConfigError, match="--splitter punkt needs nltk and its data: pip install nltk"):
        prepare(settings_for(book, tmp_path, splitter="punkt"))
    nltk = types.ModuleType("nltk")
    nltk.sent_tokenize = lambda text: text.split(". ")
    monkeypatch.setitem(sys.modules, "nltk", nltk)
    assert prepare(settings_for(book, tmp_path, splitter="punkt")).about.splitter == "punkt"


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "missing.txt", "--train-tokenizer"], "text file missing.txt: No such file"),
        (["--text", "book.txt", "--tokenizer", "."], "tokenizer tokenizer.json: No such file"),
        (["--text", "book.txt", "--train-tokenizer", "--archive", "data.zip"], "must end with .tar or .tar.gz"),
        (["--text", "book.txt", "--train-tokenizer", "--archive", "nowhere/data.tar"], "there is no folder nowhere"),
        (["--text", "book.txt", "--dataset", "other"], "text and dataset are both given"),
        (["--text", "book.txt", "--train-tokenizer", "--shards", "0"], "shards is 0; it must be at least 1"),
        (["--text", "one.txt", "--train-tokenizer", "--num-proc", "1"], "gives no samples for train"),
        (["--dataset", "wiki", "--train-tokenizer"], "must have a split 'train' with a column 'text'"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(arguments, message, book, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_bytes(book.read_bytes())
    Path("one.txt").write_text("One sentence.")
    Path("wiki").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"words": ["a"]}), "wiki/train.parquet")
    assert run(["data", "prepare", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("manyhands: ")
    assert len(said.splitlines()) == 1
    assert not Path("data/albert_tokenized_wikitext").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "missing.txt"], "text file missing.txt: No such file"),
        (["--text", "here"], "text file here: Is a directory"),
        (["--text", "book.txt", "--shards", "2"], "data/shards exists already; remove it, or name another --output"),
        (["--text", "book.txt", "--archive", "nowhere/data.tar"], "there is no folder nowhere"),
    ],
)
def test_arguments_are_checked_before_torch_is_imported(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "manyhands.recipes.albert.data.prepare", None)
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("A book.")
    Path("here").mkdir()
    Path("data/shards").mkdir(parents=True)
    assert run(["data", "prepare", "--train-tokenizer", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_data_that_is_there_is_never_overwritten(made, book):
    settings = settings_for(book, made.folder.parent)
    with pytest.raises(ConfigError, match="albert_tokenized_wikitext exists already; remove it, or name another"):
        prepare(replace(settings, seed=5))
