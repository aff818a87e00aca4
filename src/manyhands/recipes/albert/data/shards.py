"""Prepared data in files of about equal size with an index, so that peers can fetch them one by one.

::

    shards/index.json
    shards/tokenizer.json
    shards/train-00000-of-00008.arrow ...
    shards/validation-00000-of-00001.arrow

:class:`manyhands.recipes.albert.data.sample_files.SampleFiles` reads each file.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from manyhands.base.digests import sha256_of
from manyhands.recipes.albert.data.dataset import INDEX, TRAINING, VALIDATION, DatasetInfo
from manyhands.recipes.albert.data.sample_files import SampleFiles, SampleWriter
from manyhands.recipes.albert.data.tokenizer_file import FILE


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One file beside the index; ``num_samples`` is 0 for the tokenizer."""

    name: str
    num_bytes: int
    sha256: str
    num_samples: int = 0


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a folder of shards; ``about`` is the manyhands.json of the data that was split."""

    about: DatasetInfo
    tokenizer: Shard
    train: list[Shard]
    validation: list[Shard]


def write_shards(folder: Path, about: DatasetInfo, tokenizer: str, training: SampleFiles, validation: SampleFiles,
                 num_shards: int) -> Index:  # fmt: skip
    """Split the samples into files; samples of one document stay together.

    Args:
        tokenizer: as JSON.
    """
    folder.mkdir()
    (folder / FILE).write_text(tokenizer, encoding="utf-8")
    index = Index(
        about=about,
        tokenizer=_described(folder / FILE),
        train=_cut(folder, TRAINING, training, num_shards),
        validation=_cut(folder, VALIDATION, validation, 1),
    )
    (folder / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index)) + b"\n")
    return index


def _cut(folder: Path, split: str, samples: SampleFiles, num_shards: int) -> list[Shard]:
    shards = []
    for number in range(num_shards):
        path = folder / f"{split}-{number:05}-of-{num_shards:05}.arrow"
        start = number * len(samples) // num_shards
        end = (number + 1) * len(samples) // num_shards
        with SampleWriter(path) as writer:
            for batch in samples.batches(start, end):
                writer.add(batch)
        shards.append(_described(path, end - start))
    return shards


def _described(path: Path, num_samples: int = 0) -> Shard:
    return Shard(name=path.name, num_bytes=path.stat().st_size, sha256=sha256_of(path), num_samples=num_samples)
