"""Makes prepared data: several processes split text into sentences, encode it and make sentence-order pairs.

The samples, and the bytes of shard files, depend only on the text, the tokenizer and the seed, never on the number of
processes. Text is streamed: only the chunks that the processes work on are in memory.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import multiprocessing
import shutil
import signal
import sys
import tarfile
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from manyhands.base.digests import sha256_of
from manyhands.base.errors import ConfigError, MissingExtra
from manyhands.base.folder_lock import FolderInUse, FolderLock
from manyhands.base.text import reason_of
from manyhands.recipes.albert.data.corpus import iter_documents
from manyhands.recipes.albert.data.dataset import (
    ABOUT,
    DEFAULT_FOLDER,
    FORMAT,
    SAMPLES,
    SHARDS,
    TOKENIZER,
    TRAINING,
    VALIDATION,
    DatasetInfo,
    sample_digests,
)
from manyhands.recipes.albert.data.pair_maker import Chunk, Document, PairMaker, begin_process, make, splitter_named
from manyhands.recipes.albert.data.pairs import Pair, encoded
from manyhands.recipes.albert.data.preparation import Preparation
from manyhands.recipes.albert.data.sample_files import SampleFiles, SampleWriter
from manyhands.recipes.albert.data.shards import write_shards
from manyhands.recipes.albert.data.tokenizer import tokenizer_digest, tokenizer_json, train_tokenizer, wrapped
from manyhands.recipes.albert.data.tokenizer_file import FILE, backend_from_json, read_tokenizer, vocabulary_of
from manyhands.recipes.albert.packages import transformers

logger = logging.getLogger(__name__)

VALIDATION_PERIOD = 50
"""If the text has no validation split, one document in 50 is kept for it, beginning with the second one."""
HUB_TIMEOUT_S = 10.0
CHUNK_CHARS = 200_000
"""Least number of characters in a chunk, which takes a process about a third of a second."""
CHUNKS_AHEAD = 2
"""Number of queued chunks for each process, so that none is idle."""


@dataclass(frozen=True)
class Result:
    """The files that were made.

    Attributes:
        sha256: of the archive, if there is one.
    """

    folder: Path
    about: DatasetInfo
    sha256: str | None


def prepare(settings: Preparation) -> Result:
    """Make prepared data. An interrupted call leaves no files.

    Raises:
        ConfigError: the text, the tokenizer or a folder cannot be used.
    """
    splitter_named(settings.splitter)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs each attempt
    settings.check()
    if needs_hub(settings):
        _try_hub()
    source = _text_source(settings) if settings.text else _dataset_source(settings)
    with contextlib.suppress(OSError):
        settings.output.mkdir(parents=True, exist_ok=True)  # readable by others
    try:
        lock = FolderLock(settings.output, "output", ".prepare.lock")
    except FolderInUse:
        raise ConfigError(f"data is being made in {settings.output} already; wait, or name another --output") from None
    draft = settings.output / ".unfinished"
    archive = settings.archive.with_name(f".unfinished-{settings.archive.name}") if settings.archive else None
    try:
        shutil.rmtree(draft, ignore_errors=True)  # left by a killed process
        draft.mkdir()
        result = _make(settings, source, draft, archive)
        for name in settings.targets:
            (draft / name).replace(settings.output / name)
        if archive is not None and settings.archive is not None:
            archive.replace(settings.archive)
            line = f"{result.sha256}  {settings.archive.name}\n"  # the format of sha256sum; trainers look for this file
            settings.archive.with_name(f"{settings.archive.name}.sha256").write_text(line, encoding="utf-8")
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if archive is not None:
            archive.unlink(missing_ok=True)
        lock.release()
    return result


def needs_hub(settings: Preparation) -> bool:
    """Whether files of huggingface.co are needed, downloaded now or earlier."""
    is_published = settings.tokenizer_folder is None and not settings.train_tokenizer
    return is_published or not (settings.text or Path(settings.dataset).exists())


def _try_hub() -> None:
    """Ask once whether the Hub answers. If not, let its libraries use only their caches: they would retry for long."""
    import datasets
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 (each version of huggingface_hub has another HTTP library)
        logger.warning(
            "%s does not answer (%s): using only files that were downloaded from there before",
            constants.ENDPOINT, reason_of(error),
        )  # fmt: skip
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def _make(settings: Preparation, source: DocumentSource, draft: Path, archive: Path | None) -> Result:
    with _progress() as progress:
        tokenizer = _tokenizer_for(settings, source, progress)
        check_tokenizer(tokenizer)
        tokenizer.save_pretrained(draft / TOKENIZER)
        text = tokenizer_json(tokenizer)
        _write_samples(settings, source, text, draft, progress)
        raw = {split: draft / f"{split}.arrow" for split in (TRAINING, VALIDATION)}
        splits = {split: SampleFiles([path]) for split, path in raw.items()}
        about = DatasetInfo(
            format=FORMAT,
            tokenizer=tokenizer_digest(tokenizer),
            vocab_size=len(tokenizer),
            seq_length=settings.seq_length,
            source=settings.source,
            splitter=settings.splitter,
            seed=settings.seed,
            num_samples={split: len(samples) for split, samples in splits.items()},
        )
        for split, samples in splits.items():
            if not samples:
                raise ConfigError(
                    f"the text gives no samples for {split}: a sample needs two sentences of one document. Add text; "
                    "or, if each row of the data set is one sentence, combine rows: --rows-per-document 64"
                )
        _save_to_disk(raw, draft / SAMPLES)
        about = msgspec.structs.replace(about, sha256=sample_digests(draft / SAMPLES))
        (draft / ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")
        if settings.shards is not None:
            write_shards(draft / SHARDS, about, text, splits[TRAINING], splits[VALIDATION], settings.shards)
        sha256 = None
        if archive is not None:
            progress.add_task("Writing the archive", total=None)
            write_archive(archive, draft)
            sha256 = sha256_of(archive)
    return Result(settings.output, about, sha256)


@dataclass(frozen=True)
class DocumentSource:
    """A source of documents that can be read several times.

    Attributes:
        documents: returns the documents, each with its split.
        total: number of characters or rows.
        size_of: the number of characters or rows of a document.
    """

    documents: Callable[[], Iterator[tuple[str, Document]]]
    total: int
    size_of: Callable[[Document], int]


def _text_source(settings: Preparation) -> DocumentSource:
    split = splitter_named(settings.splitter)

    def documents() -> Iterator[tuple[str, Document]]:
        return _with_validation(iter_documents(settings.text, split))

    total = sum(path.stat().st_size for path in settings.text)
    return DocumentSource(documents, total, lambda document: sum(map(len, document)) + len(document))


def _dataset_source(settings: Preparation) -> DocumentSource:
    splits = _load_dataset(settings.dataset)

    def rows(split: str) -> Iterator[Document]:
        gathered: list[str] = []
        for batch in splits[split].select_columns("text").iter(1000):
            for text in batch["text"]:
                if text and not text.isspace():
                    gathered.append(text)
                if len(gathered) >= settings.rows_per_document:
                    yield " ".join(gathered)
                    gathered = []
        if gathered:
            yield " ".join(gathered)

    def documents() -> Iterator[tuple[str, Document]]:
        if VALIDATION not in splits:
            yield from _with_validation(rows(TRAINING))
            return
        for split in (TRAINING, VALIDATION):
            for document in rows(split):
                yield split, document

    total = sum(len(splits[split]) for split in (TRAINING, VALIDATION) if split in splits)
    return DocumentSource(documents, total, lambda document: settings.rows_per_document)


def _load_dataset(name: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise MissingExtra("preparing data", "albert") from error

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    path, _, config = (name, "", "") if Path(name).exists() else name.partition(":")
    try:
        splits = datasets.load_dataset(path, config or None)
    except Exception as error:
        raise ConfigError(
            f"data set {name!r} cannot be loaded: {_reason(error)}. It needs huggingface.co, or a folder with parquet "
            "files; --text FILE --train-tokenizer needs neither"
        ) from error
    if TRAINING not in splits or "text" not in splits[TRAINING].column_names:
        columns = {split: rows.column_names for split, rows in splits.items()}
        raise ConfigError(f"data set {name!r} has {columns}; it must have a split {TRAINING!r} with a column 'text'")
    return splits


def _with_validation(documents: Iterator[Any]) -> Iterator[tuple[str, Document]]:
    for number, document in enumerate(documents):
        yield VALIDATION if number % VALIDATION_PERIOD == 1 else TRAINING, document


def _tokenizer_for(
    settings: Preparation, source: DocumentSource, progress: Progress
) -> transformers.PreTrainedTokenizerFast:
    if settings.train_tokenizer:
        task = progress.add_task("Training the tokenizer", total=source.total)
        sentences = (
            [document] if isinstance(document, str) else document for _, document in _counted(source, progress, task)
        )
        return train_tokenizer(sentences, settings.vocab_size)
    if settings.tokenizer_folder is not None:
        return wrapped(read_tokenizer(settings.tokenizer_folder))
    from transformers.utils import hub

    try:
        # the published file: transformers' classes may rebuild the tokenizer by rules of their version
        file = hub.cached_file(settings.tokenizer, FILE)
        return wrapped(backend_from_json(Path(str(file)).read_text(encoding="utf-8")))
    except Exception as error:
        raise ConfigError(
            f"tokenizer {settings.tokenizer!r} cannot be loaded: {_reason(error)}. It needs huggingface.co, or a "
            "folder with a tokenizer.json; --train-tokenizer needs neither"
        ) from error


def _reason(error: Exception) -> str:
    return reason_of(error).rstrip(".")


def check_tokenizer(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    """Check that a text has the token ids of its sentences, and that a pair has ALBERT's format.

    Raises:
        ConfigError: the tokenizer fails the check.
    """
    sentences = ["The first one (of 3), it's short.", '"And" the second?', "Here they end - at last!"]
    options = {"return_token_type_ids": True, "return_special_tokens_mask": True}
    whole = tokenizer(" ".join(sentences[:2]), sentences[2], **options)
    first, second, third = (tokenizer(sentence, add_special_tokens=False)["input_ids"] for sentence in sentences)
    expected = encoded(Pair(first + second, third, 0), vocabulary_of(tokenizer.backend_tokenizer))
    if any(whole.get(name) != getattr(expected, name) for name in expected._fields):
        raise ConfigError(
            "the tokenizer cannot be used for sentence-order pairs: it must encode them as [CLS] A [SEP] B [SEP] with "
            "token types 0 and 1, and words by themselves; those of ALBERT and BERT do"
        )


def _write_samples(
    settings: Preparation, source: DocumentSource, tokenizer: str, draft: Path, progress: Progress
) -> None:
    task = progress.add_task("Making samples", total=source.total)
    options = (tokenizer, settings.splitter, settings.seq_length, settings.seed)
    with contextlib.ExitStack() as cleanup:
        writers = {
            split: cleanup.enter_context(SampleWriter(draft / f"{split}.arrow")) for split in (TRAINING, VALIDATION)
        }
        chunks = _chunks(_counted(source, progress, task))
        if settings.num_processes == 1:
            maker = PairMaker(*options)
            made: Iterator[tuple[str, Any]] = ((chunk.split, maker(chunk)) for chunk in chunks)
        else:
            made = cleanup.enter_context(contextlib.closing(_by_processes(chunks, settings.num_processes, options)))
        for split, batch in made:
            writers[split].add(batch)


def _chunks(documents: Iterator[tuple[str, Document]]) -> Iterator[Chunk]:
    waiting: dict[str, list[Document]] = {TRAINING: [], VALIDATION: []}
    num_chars = dict.fromkeys(waiting, 0)
    num_done = dict.fromkeys(waiting, 0)
    for split, document in documents:
        waiting[split].append(document)
        num_chars[split] += len(document) if isinstance(document, str) else sum(map(len, document))
        if num_chars[split] >= CHUNK_CHARS:
            yield Chunk(split, num_done[split], waiting[split])
            num_done[split] += len(waiting[split])
            waiting[split] = []
            num_chars[split] = 0
    for split, rest in waiting.items():
        yield Chunk(split, num_done[split], rest)


def _by_processes(
    chunks: Iterator[Chunk], num_processes: int, options: tuple[Any, ...]
) -> Generator[tuple[str, Any], None, None]:
    """Yield the result for each chunk, in order, computed by several processes."""
    context = multiprocessing.get_context("spawn")  # threads of torch and rich must not be forked
    pool = ProcessPoolExecutor(num_processes, context, begin_process, options)
    waiting: deque[tuple[str, Future[Any]]] = deque()
    try:
        for chunk in chunks:
            with _signals_held():  # Ctrl-C would kill a starting process with a traceback
                waiting.append((chunk.split, pool.submit(make, chunk)))
            if len(waiting) >= num_processes * CHUNKS_AHEAD:
                split, future = waiting.popleft()
                yield split, future.result()
        while waiting:
            split, future = waiting.popleft()
            yield split, future.result()
    except BrokenProcessPool as error:
        raise ConfigError(
            f"one of {num_processes} processes was killed, perhaps for lack of memory; try fewer: --num-proc 1"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Delay Ctrl-C until after the block, and block it in processes that are started within."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _counted(source: DocumentSource, progress: Progress, task: TaskID) -> Iterator[tuple[str, Document]]:
    for split, document in source.documents():
        yield split, document
        progress.advance(task, source.size_of(document))
    progress.update(task, completed=source.total)


def _save_to_disk(files: dict[str, Path], folder: Path) -> None:
    import datasets

    splits = {}
    for split, path in files.items():
        rows = datasets.Dataset.from_file(str(path))
        # a fingerprint of the content, not the path, so that the same text gives the same archive
        splits[split] = datasets.Dataset(rows.data, rows.info, fingerprint=sha256_of(path)[:16])
    shown = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        datasets.DatasetDict(splits).save_to_disk(str(folder))
    finally:
        if shown:
            datasets.enable_progress_bars()


def write_archive(path: Path, folder: Path) -> None:
    """Pack the files that a trainer finds at its default paths; the same files give the same archive."""

    def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        info.mode = 0o755 if info.isdir() else 0o644
        return info

    with contextlib.ExitStack() as cleanup:
        file: Any = cleanup.enter_context(path.open("wb"))
        if not path.name.endswith(".tar"):
            file = cleanup.enter_context(gzip.GzipFile("", "wb", 6, file, mtime=0))
        archive = cleanup.enter_context(tarfile.open(fileobj=file, mode="w"))
        for name in (ABOUT, TOKENIZER, SAMPLES):
            archive.add(folder / name, f"{DEFAULT_FOLDER}/{name}", filter=anonymous)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, transient=True, disable=not sys.stdout.isatty())
