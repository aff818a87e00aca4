"""Fetches the files of prepared data from where they are hosted: mirrors, resumed by ranges, checked by digest.

http and https are spoken by aiohttp, as each of its requests has a deadline; every other address is opened by fsspec.
Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from manyhands.base.digests import READ_BYTES, sha256_of
from manyhands.base.errors import ConfigError, MissingExtra, Unavailable
from manyhands.base.words import reason_of
from manyhands.recipes.albert.dataset import FORMAT
from manyhands.recipes.albert.shards import INDEX, Index, Shard

try:
    import aiohttp
    import fsspec
except ModuleNotFoundError as error:
    if error.name not in ("aiohttp", "fsspec"):
        raise
    raise MissingExtra("data that is fetched from an address", "data") from error

START_TIMEOUT_S = 24.0
"""For the index, from all mirrors together."""
SILENCE_S = 15.0
"""A mirror that sends nothing for so long is left."""
MIN_BYTES_PER_S = 20_000
"""A slower mirror is left as well; what it sent is kept."""
MAX_RESUMES = 8
MAX_INDEX_BYTES = 16 << 20
DIGEST = re.compile("[0-9a-f]{64}")


class FetchFailed(Unavailable):
    """None of the mirrors has delivered a file; trying again may help."""


class NoGoodCopy(FetchFailed):
    """Every mirror has delivered the whole file, and it is another one than the index says."""


class Stopped(Exception):
    """The file is not wanted any more."""


class Mirrors:
    """Several places that have the same files.

    Args:
        urls: of an ``index.json``, or of the folder that it is in.
        is_stopped: asked while a file comes.
    """

    def __init__(self, urls: Sequence[str], is_stopped: Callable[[], bool] = lambda: False) -> None:
        self._indexes = [index_url(url) for url in urls]
        self._is_stopped = is_stopped

    def index(self, scratch: Path) -> Index:
        """The index of the first mirror that has one.

        Args:
            scratch: file that it passes through.
        Raises:
            ConfigError: none has; it names each address and its reason.
        """
        reasons = []
        for url in self._indexes:
            try:
                scratch.unlink(missing_ok=True)
                self._download(url, scratch, MAX_INDEX_BYTES, START_TIMEOUT_S / len(self._indexes))
                return read_index(scratch.read_bytes())
            except (FetchFailed, ConfigError) as error:
                reasons.append(f"{url}: {error}")
            finally:
                scratch.unlink(missing_ok=True)
        raise ConfigError(
            f"the data cannot be fetched (--dataset-url): {'; '.join(reasons)}. Check the address and whether it is "
            "served: manyhands data serve FOLDER prints the line"
        )

    def fetch(self, shard: Shard, path: Path) -> None:
        """Fetch one file; what was fetched before a failure is kept beside it, and the next call goes on from there.

        Raises:
            FetchFailed: no mirror has delivered it.
            NoGoodCopy: what they deliver is another file.
            OSError: it cannot be written.
            Stopped: it is not wanted any more.
        """
        part = path.with_name(f"{path.name}.part")
        reasons, num_bad = [], 0
        for index in self._indexes:
            url = beside(index, shard.name)
            try:
                if self._has_fetched(url, shard, part):
                    part.replace(path)
                    return
                num_bad += 1
                reasons.append(f"{url}: it is not the file of the index (another size or SHA-256)")
            except FetchFailed as error:
                reasons.append(f"{url}: {error}")
        kind = NoGoodCopy if num_bad == len(self._indexes) else FetchFailed
        raise kind("; ".join(reasons))

    def _has_fetched(self, url: str, shard: Shard, part: Path) -> bool:
        """Whether the file has come, and is the right one."""
        for _ in range(MAX_RESUMES):
            before = _size(part)
            try:
                if before < shard.num_bytes:
                    self._download(url, part, shard.num_bytes, SILENCE_S + shard.num_bytes / MIN_BYTES_PER_S)
            except FetchFailed:
                if _size(part) <= before:
                    raise
                continue
            if _size(part) == shard.num_bytes and sha256_of(part) == shard.sha256:
                return True
            part.unlink(missing_ok=True)
            if not before:
                return False
            # a part of it came from elsewhere, so this mirror is asked for all of it
        raise FetchFailed(f"the connection broke off {MAX_RESUMES} times")

    def _download(self, url: str, path: Path, max_bytes: int, timeout_s: float) -> None:
        """Append to a file what it lacks, or all where ranges are not known."""
        try:
            if urlsplit(url).scheme in ("http", "https"):
                asyncio.run(self._download_by_http(url, path, max_bytes, timeout_s))
            else:
                self._download_by_fsspec(url, path, max_bytes)
        except asyncio.TimeoutError as error:
            raise FetchFailed(f"no answer, or too slow, for {timeout_s:.0f} s") from error
        except aiohttp.ClientError as error:
            raise FetchFailed(reason_of(error)) from error

    async def _download_by_http(self, url: str, path: Path, max_bytes: int, timeout_s: float) -> None:
        silence_s = min(SILENCE_S, timeout_s)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=silence_s, sock_read=silence_s)
        offset = _size(path)
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
            session.get(url, headers=headers) as response,
        ):
            if response.status not in (200, 206):
                raise FetchFailed(f"HTTP {response.status} {response.reason}")
            goes_on = response.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
            if response.status == 206 and not goes_on:
                raise FetchFailed("it answers with another range than was asked for")
            num_bytes = offset if response.status == 206 else 0
            with path.open("ab" if num_bytes else "wb") as file:
                async for data in response.content.iter_any():
                    num_bytes += len(data)
                    file.write(data)
                    self._check(num_bytes, max_bytes)

    def _download_by_fsspec(self, url: str, path: Path, max_bytes: int) -> None:
        offset = _size(path)
        options = {"timeout": SILENCE_S} if urlsplit(url).scheme == "ftp" else {}
        try:
            source = fsspec.open(url, "rb", **options).open()
        except Exception as error:
            # each kind of address has errors of its own
            raise FetchFailed(reason_of(error)) from error
        with source, path.open("ab" if offset else "wb") as file:
            while True:
                try:
                    if source.tell() != offset:
                        source.seek(offset)
                    data = source.read(READ_BYTES)
                except Exception as error:
                    raise FetchFailed(reason_of(error)) from error
                if not data:
                    return
                file.write(data)
                offset += len(data)
                self._check(offset, max_bytes)

    def _check(self, num_bytes: int, max_bytes: int) -> None:
        if self._is_stopped():
            raise Stopped
        if num_bytes > max_bytes:
            raise FetchFailed(f"it has more than {max_bytes} bytes")


def index_url(url: str) -> str:
    """The address of an index, where that of its folder may have been given."""
    parts = urlsplit(url)
    if not parts.scheme:
        raise ConfigError(f"dataset_url {url!r} is no address; for example http://203.0.113.7:8000/{INDEX}")
    if parts.path.endswith((".tar", ".tar.gz", ".tgz")):
        how = "xf" if parts.path.endswith(".tar") else "xzf"
        raise ConfigError(
            f"dataset_url {url} is an archive, which is not fetched while training. Unpack it where the trainer is "
            f"started: curl -L {url} | tar {how} -; or give the address of an index.json"
        )
    if parts.path.endswith(".json"):
        return url
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{INDEX}"))


def beside(url: str, name: str) -> str:
    """The address of another file in the folder of an index."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/{quote(name)}"))


def read_index(found: bytes) -> Index:
    """An index that somebody else wrote.

    Raises:
        ConfigError: it is none, or of another version.
    """
    try:
        index = msgspec.json.decode(found, type=Index)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"it is no index.json of manyhands data prepare --shards ({error})") from error
    if index.about.format != FORMAT:
        raise ConfigError(f"it has format {index.about.format}, and this version of manyhands reads format {FORMAT}")
    for shard in files_of(index):
        is_plain = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", shard.name)
        if not is_plain or not DIGEST.fullmatch(shard.sha256) or shard.num_bytes < 1:
            raise ConfigError(f"it names a file that cannot be: {shard.name[:64]!r}")
    if not index.train or not index.validation:
        raise ConfigError("it has no files for training, or none for validation")
    return index


def files_of(index: Index) -> list[Shard]:
    """All files beside an index."""
    return [index.tokenizer, *index.validation, *index.train]


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
