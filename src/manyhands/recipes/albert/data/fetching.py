"""Downloads the files of prepared data from several mirrors, with resume and checksums. Imports no torch."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlunsplit

import msgspec

from manyhands.base.digests import sha256_of
from manyhands.base.errors import ConfigError
from manyhands.base.urls import parts_of, without_secrets
from manyhands.recipes.albert.data.dataset import FORMAT, INDEX, address_of
from manyhands.recipes.albert.data.download import DownloadLimits, FetchFailed, Watcher, download, size_of
from manyhands.recipes.albert.data.shards import Index, Shard

START_PATIENCE_S = 20.0
"""Longest time in seconds at the start without data from any mirror; after it the data counts as unavailable."""
SILENCE_S = 15.0
"""A mirror that sends nothing for this many seconds is abandoned."""
MIN_BYTES_PER_S = 20_000
"""A mirror with a lower rate is abandoned. The received bytes are kept."""
MAX_RESUMES = 8
MAX_INDEX_BYTES = 16 << 20
ARCHIVES = (".tar", ".tar.gz", ".tgz")
DIGEST = re.compile("[0-9a-f]{64}")


class NoGoodCopy(FetchFailed):
    """Every mirror has delivered a whole file, and each differs from the index."""


class Stopped(Exception):
    """The file is not needed any more."""


class ExpectedFile(NamedTuple):
    """Expected size and digest of a file; None where unknown."""

    num_bytes: int | None = None
    sha256: str | None = None


class Patience:
    """A timer for the longest time without data, over all files and mirrors together."""

    def __init__(self, limit_s: float = START_PATIENCE_S) -> None:
        self._limit_s = limit_s
        self.renew()

    def renew(self) -> None:
        """Restart the timer, as data has arrived."""
        self._until = time.monotonic() + self._limit_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - time.monotonic())


class _Bounds(Watcher):
    """Ends the download of a file that is too long, and restarts the timer when data arrives."""

    def __init__(self, max_bytes: int | None, patience: Patience | None, watcher: Watcher) -> None:
        self._max_bytes = max_bytes
        self._patience = patience
        self._watcher = watcher

    def size_is(self, num_bytes: int) -> None:
        self._watcher.size_is(num_bytes)

    def have(self, num_bytes: int) -> None:
        self._watcher.have(num_bytes)
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            raise FetchFailed(f"it has more than {self._max_bytes} bytes")
        if self._patience is not None:
            self._patience.renew()


class Fetcher:
    """Fetches files, each from the first of its mirrors that delivers it intact.

    Args:
        watcher: gets the progress of each download.
    Attributes:
        patience: shared by all downloads at the start. Later it is None, and each mirror has ``SILENCE_S``.
    """

    def __init__(self, watcher: Watcher | None = None, patience: Patience | None = None) -> None:
        self._watcher = watcher if watcher is not None else Watcher()
        self.patience = patience

    def read_small(self, urls: Sequence[str], number: int, scratch: Path, max_bytes: int) -> bytes:
        """The content of a small file from one of the mirrors.

        Args:
            scratch: temporary file for the download.
        Raises:
            FetchFailed: no mirror has delivered it.
        """
        silence_s = self._silence_s(len(urls) - number)
        scratch.unlink(missing_ok=True)
        try:
            download(
                urls[number],
                scratch,
                DownloadLimits(silence_s, silence_s),
                _Bounds(max_bytes, self.patience, self._watcher),
            )
            return scratch.read_bytes()
        finally:
            scratch.unlink(missing_ok=True)

    def fetch(self, urls: Sequence[str], wanted: ExpectedFile, path: Path) -> int:
        """Fetch one file. After a failure the part received is kept beside it, and the next call resumes.

        Returns:
            Index of the mirror that delivered it.
        Raises:
            FetchFailed: no mirror has delivered it.
            NoGoodCopy: the mirrors deliver another file.
            OSError: the file cannot be written.
            Stopped: the file is not needed any more.
        """
        part = path.with_name(f"{path.name}.part")
        reasons = []
        num_bad = 0
        for number, url in enumerate(urls):
            try:
                if self._fetch_from(url, wanted, part, len(urls) - number):
                    part.replace(path)
                    return number
                num_bad += 1
                reasons.append(f"{without_secrets(url)}: the file differs from its description (size or SHA-256)")
            except FetchFailed as error:
                reasons.append(f"{without_secrets(url)}: {error}")
        kind = NoGoodCopy if num_bad == len(urls) else FetchFailed
        raise kind("; ".join(reasons))

    def _fetch_from(self, url: str, wanted: ExpectedFile, part: Path, num_left: int) -> bool:
        """Download a file from one mirror; return whether it is the right one.

        Raises:
            FetchFailed: the mirror has not delivered all of it.
        """
        total_s = SILENCE_S + wanted.num_bytes / MIN_BYTES_PER_S if wanted.num_bytes is not None else None
        bounds = _Bounds(wanted.num_bytes, self.patience, self._watcher)
        for _ in range(MAX_RESUMES):
            before = size_of(part)
            try:
                if wanted.num_bytes is None or before < wanted.num_bytes:
                    download(url, part, DownloadLimits(self._silence_s(num_left), total_s), bounds)
            except FetchFailed:
                if size_of(part) <= before:
                    raise
                continue
            if wanted.num_bytes in (None, size_of(part)) and wanted.sha256 in (None, sha256_of(part)):
                return True
            part.unlink(missing_ok=True)
            if not before:
                return False
            # the first part may be of another mirror, so fetch all of it from this one
        raise FetchFailed(f"the connection broke off {MAX_RESUMES} times")

    def _silence_s(self, num_left: int) -> float:
        """Longest silence of a mirror when ``num_left`` mirrors remain, itself included."""
        if self.patience is None:
            return SILENCE_S
        if not self.patience.left_s:
            raise FetchFailed("not asked, since the other mirrors have sent nothing for too long")
        return min(SILENCE_S, self.patience.left_s / num_left)


class Mirrors:
    """Several mirrors of the same shards.

    Args:
        urls: of an ``index.json``, or of its folder.
    """

    def __init__(self, urls: Sequence[str], fetcher: Fetcher) -> None:
        self._indexes = [index_url(url) for url in urls]
        self._fetcher = fetcher

    def index(self, scratch: Path) -> Index:
        """The index from the first mirror that has one.

        Args:
            scratch: temporary file for the download.
        Raises:
            ConfigError: no mirror has one; names each address and its reason.
        """
        reasons = []
        for number, url in enumerate(self._indexes):
            try:
                index = read_index(self._fetcher.read_small(self._indexes, number, scratch, MAX_INDEX_BYTES))
            except (FetchFailed, ConfigError) as error:
                reasons.append(f"{without_secrets(url)}: {error}")
            else:
                self._ask_first(number)
                return index
        raise no_data("; ".join(reasons))

    def fetch(self, shard: Shard, path: Path) -> None:
        """Fetch one file beside the index; see :meth:`Fetcher.fetch`."""
        urls = [beside(index, shard.name) for index in self._indexes]
        self._ask_first(self._fetcher.fetch(urls, ExpectedFile(shard.num_bytes, shard.sha256), path))

    def _ask_first(self, number: int) -> None:
        """Move the mirror that has just delivered to the front: a dead one must not delay each download."""
        self._indexes = self._indexes[number:] + self._indexes[:number]


def no_data(reasons: object) -> ConfigError:
    """The error for data that no address delivers."""
    return ConfigError(
        f"the data cannot be fetched: {reasons}. Check the address, and that somebody serves it: manyhands data serve "
        "FOLDER prints the option to give"
    )


def is_archive(url: str) -> bool:
    """Whether an address is that of an archive rather than an index."""
    return parts_of(url).path.endswith(ARCHIVES)


def index_url(url: str) -> str:
    """The address of an index, from its own address or that of its folder."""
    parts = parts_of(url)
    if not parts.scheme:
        folder = Path(url).parent if url.endswith(INDEX) else Path(url)
        if (folder / INDEX).is_file():
            raise ConfigError(f"dataset_url {url!r} is a path; write its address: --dataset-url {address_of(folder)}")
        raise ConfigError(f"dataset_url {url!r} is not an address; give one such as http://203.0.113.7:8000/{INDEX}")
    if is_archive(url):
        shown = without_secrets(url)
        raise ConfigError(
            f"{shown} is an archive, and the address of an index.json is needed here; unpack it where the trainer is "
            f"started: curl -L {shown} | tar {'xf' if parts.path.endswith('.tar') else 'xzf'} -"
        )
    if parts.path.endswith(".json"):
        return url
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{INDEX}"))


def beside(url: str, name: str) -> str:
    """The address of another file in the folder of an index."""
    parts = parts_of(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/{quote(name)}"))


def read_index(found: bytes) -> Index:
    """Parse an index from an untrusted source.

    Raises:
        ConfigError: it is not an index, or has another version.
    """
    try:
        index = msgspec.json.decode(found, type=Index)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"it is not an index.json of manyhands data prepare --shards ({error})") from error
    if index.about.format != FORMAT:
        raise ConfigError(f"it has format {index.about.format}, and this version of manyhands reads format {FORMAT}")
    for shard in files_of(index):
        is_plain = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", shard.name)
        if not is_plain or not DIGEST.fullmatch(shard.sha256) or shard.num_bytes < 1:
            raise ConfigError(f"it names an invalid file: {shard.name[:64]!r}")
    if not index.train or not index.validation:
        raise ConfigError("it has no files for training, or none for validation")
    return index


def files_of(index: Index) -> list[Shard]:
    """All files beside an index."""
    return [index.tokenizer, *index.validation, *index.train]
