"""Settings of ``manyhands data prepare``. Imports no torch: the command line is generated from here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manyhands.base.errors import ConfigError

WIKITEXT = "Salesforce/wikitext:wikitext-103-raw-v1"
ALBERT = "albert/albert-large-v2"
ARCHIVES = (".tar", ".tar.gz", ".tgz")


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The text to make samples of, and the settings for it.

    Raises:
        ConfigError: a value is out of bounds.
    """

    dataset: str = WIKITEXT
    """Data set with a column text: its name at huggingface.co and perhaps :CONFIG, or a folder with parquet files."""

    text: tuple[Path, ...] = ()
    """UTF-8 text files instead; every 50th document of them is kept for validation."""

    tokenizer: str = ALBERT
    """Tokenizer, by its name at huggingface.co, or a folder with a tokenizer.json."""

    train_tokenizer: bool = False
    """Train a tokenizer on the text instead; together with --text nothing is downloaded."""

    vocab_size: int = 30_000
    """Most tokens in a vocabulary that is trained."""

    splitter: Literal["rules", "punkt"] = "rules"
    """Sentence splitter: the rules of manyhands, or punkt of nltk if that is installed."""

    seq_length: int = 512
    """Most tokens in one sample, special tokens included."""

    rows_per_document: int = 1
    """Rows of the data set that make one document; for BookCorpus, whose rows are single sentences, for example 64."""

    seed: int = 0
    """Seed for cutting and swapping sentence pairs: the same text and seed give the same samples."""

    num_proc: int | None = None
    """Processes that split and encode; by default one for each CPU core."""

    output: Path = Path("data")
    """Folder for the samples, the tokenizer and manyhands.json."""

    archive: Path | None = None
    """Also write a .tar or .tar.gz to host. A trainer finds its data if it is unpacked in the trainer's folder."""

    shards: int | None = None
    """Also write the samples to this many files of about equal size, with an index.json, in OUTPUT/shards."""

    def __post_init__(self) -> None:
        examples = {"vocab_size": 30_000, "seq_length": 512, "rows_per_document": 64, "num_proc": 2, "shards": 8}
        minima = {"vocab_size": 512, "seq_length": 16}
        for name, example in examples.items():
            minimum = minima.get(name, 1)
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name} is {value}; it must be at least {minimum}, for example {example}")
        if self.archive is not None and not self.archive.name.endswith(ARCHIVES):
            raise ConfigError(f"archive {self.archive} must end with .tar or .tar.gz, for example data.tar.gz")
        if self.text and self.dataset != WIKITEXT:
            raise ConfigError("text and dataset are both given; give one of them")
        if self.train_tokenizer and self.tokenizer != ALBERT:
            raise ConfigError("train_tokenizer makes a new tokenizer; leave out tokenizer, or train_tokenizer")

    @property
    def targets(self) -> list[str]:
        """The names of the files and folders that are made in the output folder."""
        from manyhands.recipes.albert.data.dataset import ABOUT, SAMPLES, SHARDS, TOKENIZER  # needs numpy

        always = [SAMPLES, TOKENIZER, ABOUT]
        return [*always, SHARDS] if self.shards is not None else always

    def check(self) -> None:
        """Check the files before anything slow is imported.

        Raises:
            ConfigError: a text cannot be read, or a target exists already.
        """
        for path in [self.output / name for name in self.targets] + ([self.archive] if self.archive else []):
            if path.exists():
                raise ConfigError(f"{path} exists already; remove it, or name another --output and --archive")
        if self.archive is not None and not self.archive.absolute().parent.is_dir():
            raise ConfigError(f"there is no folder {self.archive.parent} for the archive; make it first")
        for path in self.text:
            try:
                path.open("rb").close()
            except OSError as error:
                raise ConfigError(f"text file {path}: {error.strerror}; name a text file that can be read") from error

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder of the tokenizer; None for a tokenizer of huggingface.co, or one to train."""
        from manyhands.recipes.albert.data.tokenizer_file import tokenizer_folder  # needs tokenizers

        folder = tokenizer_folder(Path(self.tokenizer))
        return folder if folder.is_dir() and not self.train_tokenizer else None

    @property
    def num_processes(self) -> int:
        """The given number, or the number of CPU cores that this process may use."""
        if self.num_proc is not None:
            return self.num_proc
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @property
    def source(self) -> str:
        """The origin of the text, as people read it."""
        return ", ".join(path.name for path in self.text) if self.text else self.dataset
