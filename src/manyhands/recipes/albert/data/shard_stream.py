"""Streams samples from hosted shards: the next shard is fetched while the peer trains on the current one.

Each peer goes through the shards in its own order, then again in another one. A thread fetches the next shard, and
skips shards of which no mirror has an intact copy. If the next shard is late, the peer trains on a cached one. Imports
no torch.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from manyhands.base.digests import sha256_of
from manyhands.base.errors import ConfigError
from manyhands.base.folder_lock import FolderInUse, FolderLock
from manyhands.base.urls import without_secrets
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.data.download import FetchFailed, Watcher
from manyhands.recipes.albert.data.fetching import Fetcher, Mirrors, NoGoodCopy, Patience, Stopped, no_data
from manyhands.recipes.albert.data.pairs import StoredSample
from manyhands.recipes.albert.data.sample_files import SampleFiles
from manyhands.recipes.albert.data.shards import Index, Shard

logger = logging.getLogger(__name__)

TELL_PERIOD_S = 25.0
PATIENCE_S = 60.0
"""Longest wait in seconds for a slow shard; then a cached one is used."""
WARN_PERIOD_S = 60.0
MAX_PAUSE_S = 30.0
MAX_CACHES = 64
STOP_TIMEOUT_S = 2.0


class Cache:
    """A folder of fetched files, named by their digests and locked by this process.

    Args:
        folder: its parent. Trainers that run at the same time use the folders ``1``, ``2`` ... in it.
        max_bytes: size limit. The current shard and the next one are kept in any case.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        for number in range(1, MAX_CACHES + 1):
            with contextlib.suppress(FolderInUse):
                self._lock = FolderLock(folder / str(number), "cache_dir", ".lock")
                self.folder = folder / str(number)
                return
        raise ConfigError(f"cache_dir {folder} is in use by {MAX_CACHES} trainers; name another --cache-dir")

    def path_of(self, shard: Shard) -> Path:
        return self.folder / f"{shard.sha256}{Path(shard.name).suffix}"

    def has(self, shard: Shard) -> bool:
        """Whether the file is here and intact."""
        path = self.path_of(shard)
        if not path.exists():
            return False
        if path.stat().st_size == shard.num_bytes and sha256_of(path) == shard.sha256:
            os.utime(path)
            return True
        path.unlink()
        return False

    def shards(self) -> list[Path]:
        """The complete shards, least recently used first."""
        return sorted(self.folder.glob("*.arrow"), key=lambda path: path.stat().st_mtime_ns)

    def make_room(self, num_bytes: int, kept: Sequence[Path]) -> None:
        """Remove the least recently used shards until ``num_bytes`` more fit below the limit."""
        for path in self.shards():
            if self._used() + num_bytes <= self._max_bytes:
                return
            if path not in kept:
                path.unlink()

    def shrink(self, kept: Sequence[Path]) -> bool:
        """Remove a file and lower the limit, since the disk is full. Returns False if there is no file to remove."""
        removable = [path for path in self.shards() if path not in kept]
        if not removable:
            return False
        removable[0].unlink()
        self._max_bytes = max(1, self._used())
        limit_mb = self._max_bytes // 1_000_000
        logger.warning("The disk is full: the cache %s has at most %d MB from now on", self.folder, limit_mb)
        return True

    def cannot_be_written(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cache_dir {self.folder} cannot be written: {error.strerror}; make room there, or name another --cache-dir"
        )

    def _used(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def close(self) -> None:
        self._lock.release()


class HostedData:
    """The parts of hosted data that are fetched before the first shard: index, tokenizer and held-out samples.

    Args:
        max_bytes: size limit of the cache.
    Attributes:
        tokenizer: as JSON.
    Raises:
        ConfigError: it cannot be fetched; names each address and its reason.
    """

    def __init__(self, urls: Sequence[str], cache_dir: Path, max_bytes: int) -> None:
        self.is_stopped = threading.Event()
        self.fetcher = Fetcher(_WhileWanted(self.is_stopped), Patience())
        self.mirrors = Mirrors(urls, self.fetcher)
        self.cache = Cache(cache_dir, max_bytes)
        try:
            self.index = self.mirrors.index(self.cache.folder / "index.json.part")
            self.tokenizer = self._fetched(self.index.tokenizer).read_text(encoding="utf-8")
            self.validation = SampleFiles([self._fetched(shard) for shard in self.index.validation])
        except BaseException:
            self.close()
            raise

    def heldout(self, num_samples: int) -> list[StoredSample]:
        """``num_samples`` evenly spread samples to hold out; all if there are fewer."""
        num_samples = min(num_samples, len(self.validation))
        return [self.validation[index * len(self.validation) // num_samples] for index in range(num_samples)]

    def close(self) -> None:
        """Unlock the cache."""
        self.is_stopped.set()
        self.cache.close()

    def _fetched(self, shard: Shard) -> Path:
        path = self.cache.path_of(shard)
        if not self.cache.has(shard):
            try:
                self.mirrors.fetch(shard, path)
            except FetchFailed as error:
                raise no_data(error) from error
            except OSError as error:
                raise self.cache.cannot_be_written(error) from error
        return path


class _WhileWanted(Watcher):
    def __init__(self, is_stopped: threading.Event) -> None:
        self._is_stopped = is_stopped

    def have(self, num_bytes: int) -> None:
        if self._is_stopped.is_set():
            raise Stopped


class ShardStream:
    """The training samples of an index, shard by shard.

    Args:
        data: closed with the stream.
        order: seeds the order of the shards; it differs between peers.
        position_file: keeps the number of shards that were begun, for the next start.
    Raises:
        ConfigError: no shard can be fetched; names each address and its reason.

    Attributes:
        path: the file of the current shard.
    """

    def __init__(self, data: HostedData, order: str, position_file: Path | None = None) -> None:
        self.data = data
        self.index = data.index
        self._is_stopped = data.is_stopped
        self._mirrors = data.mirrors
        self._cache = data.cache
        self._order = order
        self._position_file = position_file
        self._changed = threading.Condition()
        self._next: tuple[int, Path] | None = None
        self._why_not: Exception | None = None
        self._failure: BaseException | None = None
        self.path = self._cache.folder / "none"
        self._bad: set[str] = set()  # names of shards that cannot be used
        self._warn_at = 0.0
        self._thread = threading.Thread(target=self._run, name="shards", daemon=True)
        try:
            self._thread.start()
            self._samples = self._first()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return sum(shard.num_samples for shard in self.index.train)

    @property
    def samples(self) -> SampleFiles:
        """The samples of the current shard."""
        return self._samples

    def advance(self) -> None:
        """Continue with the next shard, or with a cached one if the next one has not arrived."""
        with self._changed:
            self._changed.wait_for(lambda: self._next or self._why_not or self._failure, PATIENCE_S)
            if self._failure is not None:
                raise self._failure
            if self._next is not None:
                self._take()
                return
        reason = self._why_not or "the transfer is slow"
        self._warn(f"the next shard has not arrived ({reason}); training goes on with shards that were fetched before")
        self._use(self._cached()[0])

    def _cached(self) -> list[Path]:
        """Cached shards for training, least recently used first; the cache may also hold other files."""
        usable = {self._cache.path_of(shard) for shard in self.index.train if shard.name not in self._bad}
        return [path for path in self._cache.shards() if path in usable]

    def close(self) -> None:
        """Stop fetching."""
        self._is_stopped.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
        self.data.close()

    def _first(self) -> SampleFiles:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._next or self._failure, TELL_PERIOD_S):
                    if self._failure is not None:
                        raise self._failure
                    self.data.fetcher.patience = None  # from now on a mirror may be slow: there is a shard to train on
                    self._take()
                    return self._samples
            logger.info("Waiting for the first shard: the transfer is slow")

    def _take(self) -> None:
        assert self._next is not None
        position, path = self._next
        self._use(path)
        self._next = None
        self._changed.notify_all()
        if self._position_file is not None:
            with contextlib.suppress(OSError):  # without the file, the next start begins at another shard
                self._position_file.write_text(json.dumps({"shards_begun": position + 1}))

    def _use(self, path: Path) -> None:
        self._samples = SampleFiles([path])
        self.path = path
        os.utime(path)

    def _run(self) -> None:
        try:
            for position, shard in self._shards():
                if not self._fetch_shard(shard):
                    continue
                with self._changed:
                    self._next = (position, self._cache.path_of(shard))
                    self._why_not = None
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._next is None or self._is_stopped.is_set())
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 (the training thread raises it)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _shards(self) -> Iterator[tuple[int, Shard]]:
        """The endless sequence of shards, from the saved position."""
        position = self._begun()
        shards = self.index.train
        bad = self._bad
        while True:
            turn, number = divmod(position, len(shards))
            order = list(shards)
            random.Random(f"shards {self._order} {turn}").shuffle(order)
            if self._is_stopped.is_set():
                raise Stopped
            if len(bad) == len(shards):
                raise ConfigError(
                    f"none of the {len(shards)} shards matches the index; ask the person who hosts them to check them: "
                    "manyhands data verify FOLDER"
                )
            if order[number].name not in bad and order[number].num_samples:
                yield position, order[number]
            elif not order[number].num_samples:
                bad.add(order[number].name)
            position += 1

    def _begun(self) -> int:
        if self._position_file is not None:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                return max(0, int(json.loads(self._position_file.read_text())["shards_begun"]))
        return 0

    def _fetch_shard(self, shard: Shard) -> bool:
        """Fetch a shard, with retries until it arrives. Returns False if no mirror has an intact copy."""
        path = self._cache.path_of(shard)
        pause_s = 1.0
        while not self._is_stopped.is_set():
            try:
                if not self._cache.has(shard):
                    kept = [self.path]
                    self._cache.make_room(shard.num_bytes, kept)
                    self._mirrors.fetch(shard, path)
                SampleFiles([path])
            except (NoGoodCopy, ConfigError) as error:
                logger.warning("Skipping shard %s: %s", shard.name, error)
                self._bad.add(shard.name)
                return False
            except FetchFailed as error:
                reason: Exception = error
            except OSError as error:
                if error.errno == errno.ENOSPC and self._cache.shrink([self.path]):
                    continue
                reason = error
            else:
                return True
            with self._changed:
                self._why_not = reason
                self._changed.notify_all()
            patience = self.data.fetcher.patience
            if patience is not None and patience.left_s < 2 * pause_s:
                raise self._cache.cannot_be_written(reason) if isinstance(reason, OSError) else no_data(reason)
            self._is_stopped.wait(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        raise Stopped

    def _warn(self, message: str) -> None:
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + WARN_PERIOD_S
            logger.warning("%s", message[0].upper() + message[1:])


def check_index(index: Index, run_id: str, recipe: AlbertRecipe, digest: str) -> None:
    """Check that the shards fit a run.

    Raises:
        ConfigError: they were made with another tokenizer, or for samples of another length.
    """
    where = f"ask the person who began run {run_id!r} for the address of its data"
    url = without_secrets(recipe.dataset_url[0])
    if index.about.tokenizer != digest:
        raise ConfigError(
            f"{url}: its tokenizer {index.about.tokenizer[:12]} is not that of run {run_id!r} "
            f"({digest[:12]}), so the token ids in the samples are wrong for this run; {where}"
        )
    if index.about.seq_length != recipe.seq_length:
        raise ConfigError(
            f"{url}: samples have up to {index.about.seq_length} tokens, and run {run_id!r} has "
            f"samples of {recipe.seq_length} (seq_length); {where}"
        )


@functools.lru_cache(maxsize=1)  # called before and after a run is found
def fetch_index(urls: tuple[str, ...]) -> Index:
    """The index of the shards, downloaded once, before any shard.

    Raises:
        ConfigError: no address has an index.
    """
    with tempfile.TemporaryDirectory() as folder:
        return Mirrors(urls, Fetcher(patience=Patience())).index(Path(folder) / "index.json")


def default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manyhands" / "data"
