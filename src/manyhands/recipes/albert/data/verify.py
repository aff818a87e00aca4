"""Compares prepared data with its index. Imports no torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from manyhands.base.digests import sha256_of
from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.data.dataset import (
    ABOUT,
    INDEX,
    SAMPLES,
    SHARDS,
    TOKENIZER,
    open_prepared,
    read_dataset_info,
    sample_digests,
)
from manyhands.recipes.albert.data.shards import Index


def problems_of(place: str, advance: Callable[[int, int], None]) -> Iterator[str]:
    """Yield a line for each problem of the data in a folder or at an address.

    Args:
        advance: called with the bytes checked since the last call, and the total.
    Raises:
        ConfigError: there is no prepared data.
    """
    folder = Path(place)
    if "://" in place:
        yield from _check_hosted(place, advance)
    elif (folder / INDEX).is_file():
        yield from _check_shards(folder, advance)
    elif (folder / ABOUT).is_file():
        yield from _check_prepared(folder, advance)
    elif folder.name == SAMPLES and (folder.parent / ABOUT).is_file():
        yield from _check_prepared(folder.parent, advance)
    else:
        raise ConfigError(
            f"{place} has neither {INDEX} nor {ABOUT}; name a folder that manyhands data prepare made, for example "
            "data/shards, or the address of one"
        )


def _check_prepared(folder: Path, advance: Callable[[int, int], None]) -> Iterator[str]:
    """Yield the problems of the samples, and of the shards beside them."""
    try:
        open_prepared(folder / SAMPLES, folder / TOKENIZER)
        about = read_dataset_info(folder / ABOUT)
    except ConfigError as error:
        yield str(error)
    else:
        assert about is not None
        if not about.sha256:
            yield f"{folder / ABOUT} has no SHA-256 of the samples: only their number was checked; make the data again"
        for name, digest in sample_digests(folder / SAMPLES).items():
            if digest != about.sha256.get(name, digest):
                yield f"{folder / SAMPLES / name} has another SHA-256 than {ABOUT} says"
    if (folder / SHARDS / INDEX).is_file():
        yield from _check_shards(folder / SHARDS, advance)


def _check_shards(folder: Path, advance: Callable[[int, int], None]) -> Iterator[str]:
    from manyhands.recipes.albert.data.fetching import files_of, read_index

    index = _read(read_index, folder / INDEX)
    total = sum(shard.num_bytes for shard in files_of(index))
    for shard in files_of(index):
        path = folder / shard.name
        if not path.is_file():
            yield f"{path} is missing"
        elif path.stat().st_size != shard.num_bytes:
            yield f"{path} has {path.stat().st_size} bytes, and {INDEX} says {shard.num_bytes}"
        elif sha256_of(path) != shard.sha256:
            yield f"{path} has another SHA-256 than {INDEX} says"
        advance(shard.num_bytes, total)


def _read(read_index: Callable[[bytes], Index], path: Path) -> Index:
    try:
        return read_index(path.read_bytes())
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_hosted(url: str, advance: Callable[[int, int], None]) -> Iterator[str]:
    from manyhands.recipes.albert.data.download import FetchFailed
    from manyhands.recipes.albert.data.fetching import Fetcher, Mirrors, files_of

    with tempfile.TemporaryDirectory() as scratch:
        mirrors = Mirrors([url], Fetcher())
        path = Path(scratch) / "file"
        index = mirrors.index(path)
        total = sum(shard.num_bytes for shard in files_of(index))
        for shard in files_of(index):
            try:
                mirrors.fetch(shard, path)
            except FetchFailed as error:
                yield str(error)
            for left in Path(scratch).iterdir():
                left.unlink()
            advance(shard.num_bytes, total)
