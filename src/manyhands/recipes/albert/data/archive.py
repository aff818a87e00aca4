"""Fetches an archive of prepared data from an address, checks it and unpacks it into the cache. Imports no torch.

::

    cache_dir/archives/0123456789abcdef/unpacked/data/manyhands.json ...

The folder is named after a hash of the address, so a second start finds the archive without a request.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import shutil
import tarfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from manyhands.base.errors import ConfigError
from manyhands.base.folder_lock import FolderInUse, FolderLock
from manyhands.base.text import amount_of, rough
from manyhands.base.urls import without_secrets
from manyhands.recipes.albert.data.dataset import SAMPLES
from manyhands.recipes.albert.data.download import FetchFailed, Watcher, size_of
from manyhands.recipes.albert.data.fetching import (
    DIGEST,
    START_PATIENCE_S,
    ExpectedFile,
    Fetcher,
    Patience,
    is_archive,
    no_data,
)
from manyhands.recipes.albert.data.shard_stream import default_cache_dir

logger = logging.getLogger(__name__)

FOLDER = "archives"
UNPACKED = "unpacked"
TELL_PERIOD_S = 10.0
LOCK_PERIOD_S = 0.5
MAX_DIGEST_BYTES = 4096


def with_unpacked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, with the folder of an archive beside its address.

    Raises:
        ConfigError: the archive cannot be fetched or used, or the disk is too small.
    """
    urls = given["dataset_url"]
    if not any(is_archive(url) for url in urls):
        return dict(given)
    if others := [url for url in urls if not is_archive(url)]:
        other = without_secrets(others[0])
        raise ConfigError(
            f"dataset_url names an archive, and also {other}, which is not one; mirrors must have the same files: "
            "give only addresses of archives, or only those of an index.json"
        )
    return {**given, "dataset_path": unpacked(urls, given.get("cache_dir") or default_cache_dir())}


def unpacked(urls: Sequence[str], cache_dir: Path) -> Path:
    """The folder with the samples of an archive, which is fetched unless it is in the cache.

    Args:
        urls: mirrors of the same archive.
    Raises:
        ConfigError: the archive cannot be fetched or used, or the disk is too small.
    """
    folders = [cache_dir / FOLDER / hashlib.sha256(url.encode()).hexdigest()[:16] for url in urls]
    folder = next((folder for folder in folders if _samples_in(folder / UNPACKED)), folders[0])
    lock = _locked(folder)
    try:
        found = _samples_in(folder / UNPACKED)
        if found is None:
            _fetch(urls, folder)
            found = _samples_in(folder / UNPACKED)
            assert found is not None
        return found
    finally:
        lock.release()


def _locked(folder: Path) -> FolderLock:
    """Lock the folder, after waiting for other processes of this machine that fetch the same archive."""
    is_told = False
    while True:
        try:
            return FolderLock(folder, "cache_dir", ".lock")
        except FolderInUse:
            if not is_told:
                logger.info("Another process is fetching the archive into %s; waiting for it", folder)
            is_told = True
            time.sleep(LOCK_PERIOD_S)


def _fetch(urls: Sequence[str], folder: Path) -> None:
    path = folder / "archive"
    logger.info("Fetching %s into %s", " or ".join(map(without_secrets, urls)), folder)
    try:
        if not path.exists():
            sha256 = _digest_beside(urls, folder / "digest", Fetcher(patience=Patience(START_PATIENCE_S / 3)))
            if sha256 is None:
                logger.info("There is no SHA-256 at %s, so the archive cannot be checked",
                            without_secrets(_digest_url(urls[0])))  # fmt: skip
            fetcher = Fetcher(_DownloadProgress(path), Patience(START_PATIENCE_S * 2 / 3))
            fetcher.fetch(urls, ExpectedFile(sha256=sha256), path)
        _unpack(urls, path, folder)
    except FetchFailed as error:
        kept = size_of(path.with_name(f"{path.name}.part"))
        advice = f". The first {amount_of(kept)} are kept: start again to fetch the rest" if kept else ""
        raise no_data(f"{error}{advice}") from error
    except OSError as error:
        raise ConfigError(
            f"cache_dir {folder} cannot be written: {error.strerror}; make room there, or name another --cache-dir"
        ) from error


def _digest_beside(urls: Sequence[str], scratch: Path, fetcher: Fetcher) -> str | None:
    """The SHA-256 in the file beside an archive, in the format of ``sha256sum``; None if there is no such file."""
    places = [_digest_url(url) for url in urls]
    for number in range(len(places)):
        with contextlib.suppress(FetchFailed):
            found = fetcher.read_small(places, number, scratch, MAX_DIGEST_BYTES)
            words = found.decode("ascii", "replace").lower().split()
            if words and DIGEST.fullmatch(words[0]):
                return words[0]
    return None


def _digest_url(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path}.sha256"))


class _DownloadProgress(Watcher):
    """Logs the progress of a download, and ends it at once if the disk is too small."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._total: int | None = None
        self._since = self._told_at = time.monotonic()
        self._at_first = size_of(path.with_name(f"{path.name}.part"))
        if self._at_first:
            logger.info("Resuming after the %s that were fetched before", amount_of(self._at_first))

    def size_is(self, num_bytes: int) -> None:
        self._total = num_bytes
        here = size_of(self._path.with_name(f"{self._path.name}.part"))
        num_missing = max(0, num_bytes - here)
        _check_disk(self._path.parent, num_missing + num_bytes, "at least, for the archive and its files")

    def have(self, num_bytes: int) -> None:
        now = time.monotonic()
        if now < self._told_at + TELL_PERIOD_S:
            return
        self._told_at = now
        if self._total is None:
            logger.info("Fetched %s", amount_of(num_bytes))
            return
        rate = max(1.0, (num_bytes - self._at_first) / (now - self._since))
        left = rough((self._total - num_bytes) / rate)
        logger.info("Fetched %s of %s; about %s to go", amount_of(num_bytes), amount_of(self._total), left)


def _samples_in(folder: Path) -> Path | None:
    return min(folder.rglob(SAMPLES), key=lambda path: len(path.parts), default=None)


def _check_disk(folder: Path, num_bytes: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigError(
            f"the disk of {folder} has {amount_of(free)} free, and {amount_of(num_bytes)} are needed {what}; make room "
            "there, or name another --cache-dir"
        )


def _unpack(urls: Sequence[str], path: Path, folder: Path) -> None:
    """Unpack the archive beside it and remove it. Members outside the folder or of special types are refused."""
    if not hasattr(tarfile, "data_filter"):
        raise ConfigError(
            "this version of Python cannot unpack archives safely (3.10.12, 3.11.4 and later can); unpack it where the "
            f"trainer is started: tar xf {path}"
        )
    draft = folder / ".unfinished"
    shutil.rmtree(draft, ignore_errors=True)  # left by a killed process
    draft.mkdir()
    try:
        with tarfile.open(path) as archive:
            num_bytes = 0
            for member in archive:
                if not member.isreg() and not member.isdir():
                    raise tarfile.TarError(f"{member.name[:64]!r} is neither a file nor a folder")
                num_bytes += member.size
            _check_disk(folder, num_bytes, "for the files of the archive")
            logger.info("Unpacking %s into %s", amount_of(num_bytes), folder)
            archive.extractall(draft, filter="data")
        if _samples_in(draft) is None:
            raise tarfile.TarError(f"it has no folder {SAMPLES}, as those of manyhands data prepare --archive have")
        shutil.rmtree(folder / UNPACKED, ignore_errors=True)
        draft.replace(folder / UNPACKED)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = re.sub(r"\s+", " ", str(error))
        if reason.startswith("file could not be opened"):  # tarfile then has a reason for each kind of archive
            reason = "it is not a tar archive, perhaps a page of the host"
        path.unlink()
        url = without_secrets(urls[0])
        raise ConfigError(
            f"the archive {url} cannot be unpacked ({reason}), and was removed from {folder}; ask the person who "
            "hosts it to look, or start again to have it fetched again"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    path.unlink()
