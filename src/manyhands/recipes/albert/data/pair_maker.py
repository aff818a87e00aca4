"""Worker processes of ``manyhands data prepare``: turn text into record batches of samples. Imports no torch.

Pairs are made of the token ids of sentences, each encoded once, rather than of text. The tokenizers that
:func:`manyhands.recipes.albert.data.prepare.check_tokenizer` accepts give the same ids for a text as for its sentences.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import connection, parent_process
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.data.corpus import Splitter, split_sentences
from manyhands.recipes.albert.data.pairs import Encoded, encoded, pairs_of
from manyhands.recipes.albert.data.sample_files import SCHEMA
from manyhands.recipes.albert.data.tokenizer_file import backend_from_json, vocabulary_of

SplitterName = Literal["rules", "punkt"]

Document = str | list[str]
"""Text to be split into sentences, or the sentences."""


class Chunk(NamedTuple):
    """Some documents of one split, and the number of the first one."""

    split: str
    first: int
    documents: Sequence[Document]


class PairMaker:
    """Makes the samples of documents. Those of a document depend only on its text, its split, its number and the seed.

    Args:
        tokenizer: as JSON.
    """

    def __init__(self, tokenizer: str, splitter: SplitterName, seq_length: int, seed: int) -> None:
        self._backend = backend_from_json(tokenizer)
        self._backend.encode_special_tokens = True  # encode a literal [MASK] in the text as text
        self._vocabulary = vocabulary_of(self._backend)
        self._split = splitter_named(splitter)
        self._seq_length = seq_length
        self._seed = seed

    def __call__(self, chunk: Chunk) -> Any:
        """A record batch with the columns of :data:`manyhands.recipes.albert.data.sample_files.SCHEMA`."""
        documents = [self._split(text) if isinstance(text, str) else text for text in chunk.documents]
        sentences = [sentence for document in documents for sentence in document]
        ids = iter(self._backend.encode_batch_fast(sentences, add_special_tokens=False))
        rows: list[Encoded] = []
        labels: list[int] = []
        for number, document in enumerate(documents, start=chunk.first):
            rng = random.Random(f"pairs {self._seed} {chunk.split} {number}")  # random.Random hashes text with SHA-512
            for pair in pairs_of([next(ids).ids for _ in document], self._seq_length, rng):
                rows.append(encoded(pair, self._vocabulary))
                labels.append(pair.label)
        return _record_batch(rows, labels)


def _record_batch(rows: Sequence[Encoded], labels: Sequence[int]) -> Any:
    lengths = np.array([len(row.input_ids) for row in rows], dtype=np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))

    def lists(columns: Iterator[list[int]], dtype: str) -> Any:
        flat = [np.array(column, dtype=dtype) for column in columns]
        values = np.concatenate(flat) if flat else np.array([], dtype=dtype)
        return pa.ListArray.from_arrays(offsets, pa.array(values))

    columns = {
        "attention_mask": lists(([1] * len(row.input_ids) for row in rows), "int8"),
        "input_ids": lists((row.input_ids for row in rows), "int32"),
        "sentence_order_label": pa.array(labels, pa.int64()),
        "special_tokens_mask": lists((row.special_tokens_mask for row in rows), "int8"),
        "token_type_ids": lists((row.token_type_ids for row in rows), "int8"),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def splitter_named(name: SplitterName) -> Splitter:
    """The function that splits a text into sentences.

    Raises:
        ConfigError: nltk or its data is missing.
    """
    if name == "rules":
        return split_sentences
    try:
        import nltk

        nltk.sent_tokenize("One sentence. Another one.")
    except (ImportError, LookupError) as error:
        raise ConfigError(
            "--splitter punkt needs nltk and its data: pip install nltk && python -m nltk.downloader punkt_tab; "
            "--splitter rules needs neither"
        ) from error
    split: Splitter = nltk.sent_tokenize
    return split


_maker: PairMaker | None = None


def begin_process(*settings: Any) -> None:
    """Initialize a worker process. It exits with its parent, even if the parent is killed."""
    global _maker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    assert parent is not None

    def end_with(sentinel: int) -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=end_with, args=(parent.sentinel,), daemon=True).start()
    _maker = PairMaker(*settings)


def make(chunk: Chunk) -> Any:
    """Call the :class:`PairMaker` of this worker process."""
    assert _maker is not None
    return _maker(chunk)
