"""Turns documents into samples of consecutive sentences, as token ids, and holds some documents out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.data.pairs import Sentence, StoredSample
from manyhands.recipes.albert.data.tokenizer_file import Vocabulary, vocabulary_of
from manyhands.recipes.albert.packages import transformers

TextSample = list[Sentence]
"""Two or more consecutive sentences of one document, with about ``seq_length`` tokens. Cut and swapped when drawn."""

Sample = TextSample | StoredSample
"""A sample of plain text, or a stored one of prepared data, which is cut and swapped already."""


class SampleStream(Protocol):
    """Samples of which only a part is on this machine at a time."""

    def __len__(self) -> int: ...

    @property
    def samples(self) -> Sequence[Sample]:
        """The current part."""
        ...

    def advance(self) -> None:
        """Replace the current part by another one."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of a peer for training and for validation.

    Attributes:
        training: in the order of the text; samples of prepared data are read from files or streamed.
        heldout: ``num_heldout`` samples, or all that prepared data has; from documents that ``training`` does not use.
        vocabulary: of the tokenizer that made them.
    """

    training: Sequence[Sample] | SampleStream
    heldout: Sequence[Sample]
    vocabulary: Vocabulary

    def close(self) -> None:
        """Stop fetching."""
        if not isinstance(self.training, Sequence):
            self.training.close()


def make_samples(
    documents: Sequence[Sequence[str]], tokenizer: transformers.PreTrainedTokenizerFast, recipe: AlbertRecipe
) -> Samples:
    """Encode the documents, cut them into samples and keep some documents out of training.

    The same documents, tokenizer and recipe give the same samples on every peer. All token ids are kept in memory,
    about 10 bytes for each character of text.

    Raises:
        ConfigError: the text is too short for one batch and the held-out samples.
    """
    by_document = [list(cut_samples(sentences, recipe.seq_length)) for sentences in _encode(documents, tokenizer)]
    heldout_documents = _choose_heldout(by_document, recipe)
    heldout = [sample for index in heldout_documents for sample in by_document[index]]
    chosen = frozenset(heldout_documents)
    training = [sample for index, samples in enumerate(by_document) if index not in chosen for sample in samples]
    if len(heldout) < recipe.num_heldout or len(training) < recipe.batch_size:
        raise ConfigError(
            f"the text is too short: it gives {len(training)} samples of {recipe.seq_length} tokens for training and "
            f"{len(heldout)} to hold out; at least {recipe.batch_size} and {recipe.num_heldout} are needed: give more "
            "text"
        )
    vocabulary = vocabulary_of(tokenizer.backend_tokenizer)
    return Samples(training=training, heldout=heldout[: recipe.num_heldout], vocabulary=vocabulary)


def cut_samples(sentences: Sequence[Sentence], seq_length: int) -> Iterator[TextSample]:
    """Collect sentences until they have ``seq_length`` tokens together, then begin the next sample.

    A sentence longer than half of that is cut in pieces first, so that every full sample has two parts to put in order.
    The rest at the end of the document is a sample if it has two parts and at least half the tokens.
    """
    sample: TextSample = []
    num_tokens = 0
    for part in _short_parts(sentences, seq_length // 2):
        sample.append(part)
        num_tokens += len(part)
        if num_tokens >= seq_length:
            yield sample
            sample = []
            num_tokens = 0
    if len(sample) >= 2 and num_tokens >= seq_length // 2:
        yield sample


def _short_parts(sentences: Sequence[Sentence], max_tokens: int) -> Iterator[Sentence]:
    for sentence in sentences:
        for start in range(0, len(sentence), max_tokens):
            yield sentence[start : start + max_tokens]


def _encode(
    documents: Sequence[Sequence[str]], tokenizer: transformers.PreTrainedTokenizerFast
) -> Iterator[list[Sentence]]:
    for document in documents:
        encoded = tokenizer(list(document), add_special_tokens=False, split_special_tokens=True)
        yield encoded["input_ids"]


def _choose_heldout(by_document: Sequence[Sequence[TextSample]], recipe: AlbertRecipe) -> list[int]:
    """Indices of random documents, the same on all peers, with ``num_heldout`` samples together."""
    order = list(range(len(by_document)))
    random.Random("held-out documents").shuffle(order)
    chosen = []
    num_samples = 0
    for index in order:
        if num_samples >= recipe.num_heldout:
            break
        chosen.append(index)
        num_samples += len(by_document[index])
    return chosen
