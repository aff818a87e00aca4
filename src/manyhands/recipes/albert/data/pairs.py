"""Sentence-order pairs, from the sentences of a document. Imports no torch: each worker that prepares data imports it.

Sentences are collected until they have ``seq_length`` tokens or the document ends, then cut between two of them,
swapped half of the time, and truncated. A single sentence makes no pair, and no pair has parts of two documents.

Source: Lan et al., ALBERT, arXiv:1909.11942, 3.1; the same as the preprocessing of hivemind's ALBERT example.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from manyhands.recipes.albert.config import NUM_PAIR_TOKENS
from manyhands.recipes.albert.data.tokenizer_file import Vocabulary

Sentence = list[int]
"""Token ids of one sentence, without special tokens."""

IN_ORDER = 0
"""Sentence-order label of a pair in the order of the text."""
SWAPPED = 1
"""Sentence-order label of a pair in reverse order."""


class Pair(NamedTuple):
    """Two segments, without special tokens; ``label`` is ``SWAPPED`` if the text has them in reverse order."""

    first: Sentence
    second: Sentence
    label: int


def pairs_of(document: Iterable[Sentence], seq_length: int, rng: random.Random) -> Iterator[Pair]:
    """The pairs of one document."""
    gathered: list[Sentence] = []
    num_tokens = 0
    for sentence in filter(None, document):
        gathered.append(sentence)
        num_tokens += len(sentence)
        if num_tokens >= seq_length:
            if len(gathered) > 1:
                yield truncated(ordered_pair(gathered, rng), seq_length)
            gathered = []
            num_tokens = 0
    if len(gathered) > 1:
        yield truncated(ordered_pair(gathered, rng), seq_length)


def ordered_pair(sentences: Sequence[Sentence], rng: random.Random) -> Pair:
    """Cut between two random sentences, and swap the segments half of the time."""
    cut = rng.randrange(1, len(sentences))
    first = list(chain.from_iterable(sentences[:cut]))
    second = list(chain.from_iterable(sentences[cut:]))
    return Pair(second, first, SWAPPED) if rng.random() < 0.5 else Pair(first, second, IN_ORDER)


def truncated(pair: Pair, seq_length: int) -> Pair:
    """Truncate the segments at their ends, the longer one first, until they fit with the special tokens.

    If the number of tokens is odd, the longer one keeps one more, as in ``longest_first`` of ``tokenizers``.
    """
    max_tokens = seq_length - NUM_PAIR_TOKENS
    shorter = min(len(pair.first), len(pair.second))
    longer = max(shorter, max_tokens - shorter)
    if shorter + longer > max_tokens:
        shorter = max_tokens // 2
        longer = (max_tokens + 1) // 2
    in_order = len(pair.first) <= len(pair.second)
    num_first, num_second = (shorter, longer) if in_order else (longer, shorter)
    return Pair(pair.first[:num_first], pair.second[:num_second], pair.label)


class Encoded(NamedTuple):
    """A pair with its special tokens, in the format of BERT and ALBERT: ``[CLS] A [SEP] B [SEP]``."""

    input_ids: list[int]
    token_type_ids: list[int]
    special_tokens_mask: list[int]


def encoded(pair: Pair, vocabulary: Vocabulary) -> Encoded:
    """Add the special tokens to a pair."""
    num_first = len(pair.first)
    num_second = len(pair.second)
    return Encoded(
        input_ids=[vocabulary.cls, *pair.first, vocabulary.sep, *pair.second, vocabulary.sep],
        token_type_ids=[0] * (num_first + 2) + [1] * (num_second + 1),
        special_tokens_mask=[1, *[0] * num_first, 1, *[0] * num_second, 1],
    )


class StoredSample(NamedTuple):
    """One row: token ids with special tokens, without padding.

    Attributes:
        special_tokens_mask: 1 where a token need not be guessed.
        label: ``SWAPPED`` or ``IN_ORDER``.
    """

    input_ids: np.ndarray[Any, Any]
    token_type_ids: np.ndarray[Any, Any]
    special_tokens_mask: np.ndarray[Any, Any]
    label: int
