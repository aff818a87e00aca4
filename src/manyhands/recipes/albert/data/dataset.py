"""A folder of prepared data, as made by ``manyhands data prepare`` or by hivemind's own script. Imports no torch.

::

    data/manyhands.json                    its description; hivemind's archives have none
    data/tokenizer/tokenizer.json          the tokenizer that made the samples
    data/albert_tokenized_wikitext/        samples for training and validation, in the format of ``datasets``
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from manyhands.base.digests import sha256_of
from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.config import NUM_PAIR_TOKENS, AlbertRecipe
from manyhands.recipes.albert.data.pairs import StoredSample
from manyhands.recipes.albert.data.sample_files import SampleFiles
from manyhands.recipes.albert.data.tokenizer_file import (
    FILE,
    Vocabulary,
    digest_of_json,
    read_tokenizer,
    tokenizer_folder,
    vocabulary_of,
)

FORMAT = 1
"""Version of the format. It goes up when older versions of manyhands cannot read the data any more."""

DEFAULT_FOLDER = Path("data")

# names in the folder
SAMPLES = "albert_tokenized_wikitext"
TOKENIZER = "tokenizer"
ABOUT = "manyhands.json"
SHARDS = "shards"
INDEX = "index.json"
TRAINING = "train"
VALIDATION = "validation"

PREPARE = "manyhands data prepare"
NUM_LOOKED_AT = 64
"""Number of samples of each split that are checked before training."""


class DatasetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of prepared data.

    Attributes:
        tokenizer: its digest.
        source: origin of the text.
        num_samples: of each split.
        sha256: of each file of samples, by its path in their folder, with ``/``.
    """

    format: int
    tokenizer: str
    vocab_size: int
    seq_length: int
    source: str
    splitter: str
    seed: int
    num_samples: dict[str, int]
    sha256: dict[str, str] = {}

    def content_digest(self) -> str:
        """A SHA-256 of all that determines the samples. It is equal for shards and the folder they were made from."""
        decisive = (self.tokenizer, self.seq_length, self.num_samples, self.sha256)
        return hashlib.sha256(msgspec.json.encode(decisive, order="sorted")).hexdigest()


@dataclass(frozen=True)
class Prepared:
    """Prepared data that fits its tokenizer.

    Attributes:
        tokenizer: folder of the tokenizer; None if a peer of the run sends it.
        digest: of the tokenizer; None if unknown.
        seq_length: from the description of the data, or else the length of the longest sample.
    """

    path: Path
    training: SampleFiles
    validation: SampleFiles
    tokenizer: Path | None
    digest: str | None
    vocabulary: Vocabulary | None
    seq_length: int
    about: DatasetInfo | None

    def content_digest(self) -> str:
        """A SHA-256 of the samples, from their description; without one, of their number and some of them."""
        if self.about is not None:
            return self.about.content_digest()
        digest = hashlib.sha256(f"{len(self.training)} {len(self.validation)}".encode())
        for samples in (self.training, self.validation):
            for sample in _spread(samples, NUM_LOOKED_AT):
                digest.update(f"{sample.label} {sample.input_ids.tolist()}".encode())
        return digest.hexdigest()

    def settings(self) -> dict[str, Any]:
        """The recipe settings that follow from the data."""
        size = {"vocab_size": self.vocabulary.size} if self.vocabulary is not None else {}
        return {"seq_length": self.seq_length} | size

    def check_run(self, run_id: str, recipe: AlbertRecipe, digest: str) -> None:
        """Check that the data fits a run.

        Raises:
            ConfigError: it was made with another tokenizer, or for samples of another length.
        """
        where = f"ask the person who began run {run_id!r} for its data, or train on text: --text FILE"
        if self.digest is not None and self.digest != digest:
            path = self.tokenizer / FILE if self.tokenizer is not None else self.path.parent / ABOUT
            raise ConfigError(
                f"{path}: tokenizer {self.digest[:12]} is not that of run {run_id!r} ({digest[:12]}), so the token ids "
                f"in {self.path} are wrong for this run; {where}"
            )
        is_described = self.about is not None
        if self.seq_length > recipe.seq_length or (is_described and self.seq_length < recipe.seq_length):
            raise ConfigError(
                f"{self.path}: samples have up to {self.seq_length} tokens, and run {run_id!r} has samples of "
                f"{recipe.seq_length} (seq_length); {where}; or make it: {PREPARE} --seq-length {recipe.seq_length}"
            )

    def heldout(self, num_samples: int) -> list[StoredSample]:
        """``num_samples`` evenly spread samples of the validation split; all if it has fewer."""
        return _spread(self.validation, num_samples)


def _spread(samples: SampleFiles, num_samples: int) -> list[StoredSample]:
    """``num_samples`` evenly spread samples; all if there are fewer."""
    num_samples = min(num_samples, len(samples))
    return [samples[index * len(samples) // num_samples] for index in range(num_samples)]


def found_here(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, with the data at the default path if it exists and the user named no other data.

    The folder of ``manyhands data prepare`` stands for the samples in it, and a ``tokenizer.json`` for its folder.
    """
    found = dict(given)
    if found.get("dataset_path") is not None and (found["dataset_path"] / SAMPLES).is_dir():
        found["dataset_path"] /= SAMPLES
    if found.get("tokenizer") is not None:
        found["tokenizer"] = tokenizer_folder(found["tokenizer"])
    is_named = given.get("text") or given.get("dataset_url") or given.get("dataset_path") is not None
    if not is_named and (DEFAULT_FOLDER / SAMPLES).is_dir():
        found["dataset_path"] = DEFAULT_FOLDER / SAMPLES
    if found.get("dataset_path") is not None and found.get("tokenizer") is None:
        beside = found["dataset_path"].parent / TOKENIZER
        if beside.is_dir():
            found["tokenizer"] = beside
    return found


def open_prepared(path: Path, tokenizer: Path | None) -> Prepared:
    """Open a folder with samples.

    Raises:
        ConfigError: it is missing, damaged or truncated, was made with another tokenizer, or has shards.
    """
    if (path / INDEX).is_file():
        raise ConfigError(
            f"{path} has shards; give their address instead of the folder: --dataset-url {address_of(path)}"
        )
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path} (dataset_path); make the data with: {PREPARE}")
    about = read_dataset_info(path.parent / ABOUT)
    training, validation = (SampleFiles(_files(path / split)) for split in (TRAINING, VALIDATION))
    backend = read_tokenizer(tokenizer) if tokenizer is not None else None
    digest = digest_of_json(backend.to_str()) if backend is not None else None
    if about is not None:
        _check_about(path, about, {TRAINING: training, VALIDATION: validation})
        if digest is not None and digest != about.tokenizer:
            raise ConfigError(
                f"{tokenizer}/{FILE} is not the tokenizer that the samples in {path} were made with "
                f"({path.parent / ABOUT} names {about.tokenizer[:12]}, this is {digest[:12]}); get both from one "
                "archive"
            )
        digest = about.tokenizer
    if not training or not validation:
        raise ConfigError(f"{path} has {len(training)} samples for training and {len(validation)} for validation; "
                          f"make it again: {PREPARE}")  # fmt: skip
    prepared = Prepared(
        path, training, validation, tokenizer, digest,
        vocabulary_of(backend) if backend is not None else None,
        about.seq_length if about is not None else max(training.longest(), validation.longest()), about,
    )  # fmt: skip
    if prepared.vocabulary is not None:
        check_samples(prepared, prepared.vocabulary)
    return prepared


def address_of(shards: Path) -> str:
    """The address of the index of shards on this machine, quoted for a shell."""
    return shlex.quote(f"file://{(shards / INDEX).absolute()}")


def check_samples(prepared: Prepared, vocabulary: Vocabulary) -> None:
    """Check some samples against the vocabulary.

    Raises:
        ConfigError: they were not made with this tokenizer.
    """
    for samples in (prepared.training, prepared.validation):
        for sample in _spread(samples, NUM_LOOKED_AT):
            ids = sample.input_ids
            if (
                len(ids) < NUM_PAIR_TOKENS
                or (ids[0], ids[-1]) != (vocabulary.cls, vocabulary.sep)
                or not 0 <= ids.min() <= ids.max() < vocabulary.size
                or not len(ids) == len(sample.token_type_ids) == len(sample.special_tokens_mask)
            ):
                tokenizer = prepared.tokenizer or "of the run"
                raise ConfigError(
                    f"the samples in {prepared.path} were not made with the tokenizer {tokenizer}; get both from one "
                    f"archive, or make them: {PREPARE}"
                )


def _check_about(path: Path, about: DatasetInfo, splits: Mapping[str, Sequence[StoredSample]]) -> None:
    for name, samples in splits.items():
        if len(samples) != about.num_samples.get(name):
            raise ConfigError(
                f"{path / name} has {len(samples)} samples, and {path.parent / ABOUT} says "
                f"{about.num_samples.get(name)}: it is truncated, or of other data; get the archive again"
            )


def sample_digests(samples: Path) -> dict[str, str]:
    """The SHA-256 of each file of samples, as :attr:`DatasetInfo.sha256`."""
    return {path.relative_to(samples).as_posix(): sha256_of(path) for path in sorted(samples.rglob("*.arrow"))}


def read_dataset_info(path: Path) -> DatasetInfo | None:
    """The description of the data; None if there is none.

    Raises:
        ConfigError: it is damaged, or of another format.
    """
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        version = msgspec.json.decode(found, type=dict[str, Any]).get("format")
        if version != FORMAT:
            raise ConfigError(
                f"{path} has format {version}, and this version of manyhands reads format {FORMAT}; "
                f"update manyhands, or make the data again: {PREPARE}"
            )
        return msgspec.json.decode(found, type=DatasetInfo)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is damaged ({error}); get the archive again") from error


def _files(split: Path) -> Iterable[Path]:
    """The files of one split, as listed by ``datasets``."""
    try:
        state = json.loads((split / "state.json").read_text(encoding="utf-8"))
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise ConfigError(
                f"{split} was saved with an order that its files do not have; call flatten_indices() and save it again"
            )
        return [split / file["filename"] for file in state["_data_files"]]
    except FileNotFoundError as error:
        raise ConfigError(
            f"{split} has no {Path(error.filename).name}, so it is no prepared data; name the folder that "
            f"{PREPARE} makes, for example {DEFAULT_FOLDER / SAMPLES}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{split}/state.json cannot be read ({error}); get the archive again") from error
