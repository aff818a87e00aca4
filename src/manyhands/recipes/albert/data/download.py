"""Downloads a file from one address and resumes earlier attempts; every wait has a deadline. Imports no torch.

aiohttp handles http and https. fsspec opens all other addresses (s3, ftp, file); its calls have no deadline, so each
runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from manyhands.base.digests import READ_BYTES
from manyhands.base.errors import MissingExtra, Unavailable
from manyhands.base.text import reason_of

try:
    import aiohttp
    import fsspec
    from fsspec.registry import known_implementations
except ModuleNotFoundError as error:
    if error.name not in ("aiohttp", "fsspec"):
        raise
    raise MissingExtra("data that is fetched from an address", "data") from error

T = TypeVar("T")


class FetchFailed(Unavailable):
    """A file was not downloaded completely; a retry may help."""


class DownloadLimits(NamedTuple):
    """The limits of a download, in seconds.

    Attributes:
        silence_s: longest time without data.
        total_s: longest time for the whole file; None for a file of unknown size.
    """

    silence_s: float
    total_s: float | None


class Watcher:
    """Callbacks of a download; an exception from one of them ends the download."""

    def size_is(self, num_bytes: int) -> None:
        """Called with the size of the whole file before any of it is written, if the server reports it."""

    def have(self, num_bytes: int) -> None:
        """Called with the number of bytes that are in the file now."""


def download(url: str, path: Path, limits: DownloadLimits, watcher: Watcher) -> None:
    """Append the missing part to a file, or write it from the start if the server does not support ranges.

    Raises:
        FetchFailed: the connection broke, or a limit was exceeded; the bytes received so far are kept.
        OSError: the file cannot be written.
    """
    try:
        if urlsplit(url).scheme in ("http", "https"):
            asyncio.run(_by_http(url, path, limits, watcher))
        else:
            _by_fsspec(url, path, limits, watcher)
    except asyncio.TimeoutError as error:
        raise FetchFailed(f"no answer for {limits.silence_s:.0f} s, or the transfer is too slow") from error
    except aiohttp.ClientConnectorError as error:
        cause = error.os_error
        known = os.strerror(cause.errno) if cause.errno is not None and cause.errno > 0 else cause.strerror
        raise FetchFailed(known or reason_of(error)) from error
    except aiohttp.ClientResponseError as error:  # its text has the whole address
        raise FetchFailed(f"HTTP {error.status} {error.message}".strip()) from error
    except aiohttp.ClientError as error:
        raise FetchFailed(reason_of(error)) from error


async def _by_http(url: str, path: Path, limits: DownloadLimits, watcher: Watcher) -> None:
    timeout = aiohttp.ClientTimeout(total=limits.total_s, connect=limits.silence_s, sock_read=limits.silence_s)
    offset = size_of(path)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
    async with (
        aiohttp.ClientSession(timeout=timeout, trust_env=True, auto_decompress=False) as session,
        session.get(url, headers=headers) as response,
    ):
        if response.status == 416:
            with path.open("wb"):
                raise FetchFailed("the file there is shorter than the part that was fetched before")
        if response.status not in (200, 206):
            raise FetchFailed(f"HTTP {response.status} {response.reason}")
        goes_on = response.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
        if response.status == 206 and not goes_on:
            raise FetchFailed("the server sent another range than the requested one")
        num_bytes = offset if response.status == 206 else 0
        if response.content_length is not None:
            watcher.size_is(num_bytes + response.content_length)
        with path.open("ab" if num_bytes else "wb") as file:
            async for data in response.content.iter_any():
                num_bytes += len(data)
                file.write(data)
                watcher.have(num_bytes)


def _by_fsspec(url: str, path: Path, limits: DownloadLimits, watcher: Watcher) -> None:
    offset = size_of(path)
    deadline = time.monotonic() + limits.total_s if limits.total_s is not None else math.inf

    def waited_for(call: Callable[[], T]) -> T:
        return _within(min(limits.silence_s, deadline - time.monotonic()), call)

    source = waited_for(partial(_opened, url, limits.silence_s))
    if (size := getattr(source, "size", None)) is not None:
        watcher.size_is(size)
    with path.open("ab" if offset else "wb") as file:
        while data := waited_for(partial(_read, source, offset)):
            file.write(data)
            offset += len(data)
            watcher.have(offset)
    waited_for(source.close)


def _opened(url: str, silence_s: float) -> Any:
    timeout_s = 2 * silence_s  # also ends a thread that was abandoned
    options: dict[str, Any] = {}
    scheme = urlsplit(url).scheme
    if scheme == "ftp":
        options = {"timeout": timeout_s}
    elif scheme == "s3":
        options = {"config_kwargs": {"connect_timeout": timeout_s, "read_timeout": timeout_s}}
    try:
        return _opened_with(url, options)
    except Exception as error:
        if scheme == "s3" and type(error).__name__ == "NoCredentialsError":  # public data needs no credentials
            return _opened_with(url, options | {"anon": True})
        raise


def _opened_with(url: str, options: dict[str, Any]) -> Any:
    try:
        filesystem, place = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = known_implementations[urlsplit(url).scheme]["class"].partition(".")[0]
        raise FetchFailed(f"this kind of address needs another package; try: pip install {package}") from error
    return filesystem.open(place, "rb", block_size=READ_BYTES)


def _read(source: Any, offset: int) -> bytes:
    if source.tell() != offset:
        source.seek(offset)
    data: bytes = source.read(READ_BYTES)
    return data


def _within(timeout_s: float, call: Callable[[], T]) -> T:
    """Run a call that has no deadline in a thread; if it is late, the thread is abandoned.

    Raises:
        FetchFailed: it is late or has failed; each kind of address has its own errors.
    """
    results: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except Exception as error:  # noqa: BLE001 (raised below)
            results.put((None, error))

    threading.Thread(target=run, name="fsspec", daemon=True).start()
    try:
        result, error = results.get(timeout=max(0.0, timeout_s))
    except queue.Empty:
        raise asyncio.TimeoutError from None
    if isinstance(error, FetchFailed):
        raise error
    if error is not None:
        raise FetchFailed(reason_of(error)) from error
    return result  # type: ignore[return-value]


def size_of(path: Path) -> int:
    """Size of a file in bytes; 0 if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
