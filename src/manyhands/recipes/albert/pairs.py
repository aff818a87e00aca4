"""Sentence-order pairs, from the sentences of a document. Imports no torch: every process that prepares data has it.

Sentences are gathered until they have ``seq_length`` tokens or the document ends; what is gathered is cut between two
of them, swapped half of the time, and shortened. A single sentence makes no pair, and no pair has parts of two
documents.

Source: Lan et al., ALBERT, arXiv:1909.11942, 3.1; the same as the preprocessing of hivemind's ALBERT example.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from manyhands.recipes.albert.config import NUM_PAIR_TOKENS
from manyhands.recipes.albert.tokenizer_file import Vocabulary

Sentence = list[int]
"""Token ids of one sentence, without special tokens."""

IN_ORDER, SWAPPED = 0, 1
"""The two sentence-order labels."""


class Pair(NamedTuple):
    """Two segments, without special tokens; ``label`` is ``SWAPPED`` if the text has them the other way round."""

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
            gathered, num_tokens = [], 0
    if len(gathered) > 1:
        yield truncated(ordered_pair(gathered, rng), seq_length)


def ordered_pair(sentences: Sequence[Sentence], rng: random.Random) -> Pair:
    """Cut between two sentences, each place as likely, and swap the segments half of the time."""
    cut = rng.randrange(1, len(sentences))
    first, second = list(chain.from_iterable(sentences[:cut])), list(chain.from_iterable(sentences[cut:]))
    return Pair(second, first, SWAPPED) if rng.random() < 0.5 else Pair(first, second, IN_ORDER)


def truncated(pair: Pair, seq_length: int) -> Pair:
    """Shorten the segments at their ends until they fit with the special tokens, the longer one first.

    The longer one keeps an odd token, as where ``tokenizers`` truncates a pair (``longest_first``).
    """
    max_tokens = seq_length - NUM_PAIR_TOKENS
    shorter = min(len(pair.first), len(pair.second))
    longer = max(shorter, max_tokens - shorter)
    if shorter + longer > max_tokens:
        shorter, longer = max_tokens // 2, (max_tokens + 1) // 2
    in_order = len(pair.first) <= len(pair.second)
    num_first, num_second = (shorter, longer) if in_order else (longer, shorter)
    return Pair(pair.first[:num_first], pair.second[:num_second], pair.label)


class Encoded(NamedTuple):
    """A pair between its special tokens, as BERT and ALBERT read it: ``[CLS] A [SEP] B [SEP]``."""

    input_ids: list[int]
    token_type_ids: list[int]
    special_tokens_mask: list[int]


def encoded(pair: Pair, vocabulary: Vocabulary) -> Encoded:
    """Put the special tokens around a pair."""
    num_first, num_second = len(pair.first), len(pair.second)
    return Encoded(
        input_ids=[vocabulary.cls, *pair.first, vocabulary.sep, *pair.second, vocabulary.sep],
        token_type_ids=[0] * (num_first + 2) + [1] * (num_second + 1),
        special_tokens_mask=[1, *[0] * num_first, 1, *[0] * num_second, 1],
    )


class StoredSample(NamedTuple):
    """One row: token ids with their special tokens, without padding.

    Attributes:
        special_tokens_mask: 1 where a token is not to be guessed.
        label: ``SWAPPED`` or ``IN_ORDER``.
    """

    input_ids: np.ndarray[Any, Any]
    token_type_ids: np.ndarray[Any, Any]
    special_tokens_mask: np.ndarray[Any, Any]
    label: int
