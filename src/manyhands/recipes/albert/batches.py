"""Batches for masked language modelling and sentence-order prediction.

A sample is masked anew each time it is drawn (dynamic masking). Samples of plain text are also cut and perhaps swapped
anew. Those of prepared data were cut and swapped when the data was made.

A share of the ordinary tokens of *each sample* is masked, and at least one token, because
:func:`manyhands.recipes.albert.model.loss_of` takes the mean over them, and then over the samples. A batch is padded to
its longest sample: most samples of WikiText are far shorter than ``seq_length``, and a model computes on padding too.

Source: Lan et al., ALBERT, arXiv:1909.11942, 3.1; Devlin et al., BERT, arXiv:1810.04805, for the 80/10/10 masking.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.data.pairs import StoredSample, encoded, ordered_pair, truncated
from manyhands.recipes.albert.data.samples import Sample, Samples, SampleStream
from manyhands.recipes.albert.data.tokenizer_file import Vocabulary
from manyhands.recipes.albert.packages import torch

IGNORED = -100
"""Label of a token that the model need not guess."""

PAD_MULTIPLE = 8
"""The length of a batch is a multiple of this, since GPUs multiply such matrices faster."""

Batch = dict[str, torch.Tensor]
"""int64: ``input_ids``, ``attention_mask``, ``token_type_ids`` and ``labels`` [B, S]; ``sentence_order_label`` [B]."""


class Batches(Iterator[Batch]):
    """The endless training batches of one peer: every sample once in an order of its own, then again in another order.

    Args:
        samples: :attr:`Samples.training` is used.
        recipe: the one that made the samples; gives ``batch_size`` (B), ``mask_probability``, and ``seq_length``, the
            upper bound of S.
        order: seeds the order of the samples and the masks. The same value with the same ``recipe.seed`` gives the same
            batches.
        is_padded: whether S is always ``seq_length``, as if each batch had a sample of that length.

    Attributes:
        batch_size: samples of the next batch.
    """

    def __init__(self, samples: Samples, recipe: AlbertRecipe, order: str, *, is_padded: bool = False) -> None:
        self._rng = random.Random(f"batches {recipe.seed} {order}")  # random.Random hashes text with SHA-512
        self._recipe = recipe
        self.batch_size = recipe.batch_size
        self._vocabulary = samples.vocabulary
        self._order = endless_order(samples.training, self._rng)
        self._num_columns = recipe.seq_length if is_padded else 0

    def __next__(self) -> Batch:
        chosen = [next(self._order) for _ in range(self.batch_size)]
        return _batch(chosen, self._recipe, self._vocabulary, self._rng, self._num_columns)


def heldout_batch(samples: Samples, recipe: AlbertRecipe) -> Batch:
    """All of :attr:`Samples.heldout` as one batch, cut and masked alike on every peer that has the same data."""
    return _batch(samples.heldout, recipe, samples.vocabulary, random.Random("held-out batch"))


def _batch(
    samples: Sequence[Sample], recipe: AlbertRecipe, vocabulary: Vocabulary, rng: random.Random, num_columns: int = 0
) -> Batch:
    rows = [_stored(sample, recipe.seq_length, vocabulary, rng) for sample in samples]
    longest = max(num_columns, *(len(row.input_ids) for row in rows))
    longest += -longest % PAD_MULTIPLE
    shape = (len(rows), min(longest, recipe.seq_length))
    seen_BS = np.full(shape, vocabulary.pad, dtype=np.int64)  # noqa: N806
    labels_BS = np.full(shape, IGNORED, dtype=np.int64)  # noqa: N806
    kinds_BS = np.zeros(shape, dtype=np.int64)  # noqa: N806
    attention_BS = np.zeros(shape, dtype=np.int64)  # noqa: N806
    for index, row in enumerate(rows):
        length = len(row.input_ids)
        ordinary = np.flatnonzero(row.special_tokens_mask == 0).tolist()
        seen, labels = mask_tokens(row.input_ids.tolist(), ordinary, recipe.mask_probability, vocabulary, rng)
        seen_BS[index, :length] = seen
        labels_BS[index, :length] = labels
        kinds_BS[index, :length] = row.token_type_ids
        attention_BS[index, :length] = 1
    return {
        "input_ids": torch.from_numpy(seen_BS),
        "attention_mask": torch.from_numpy(attention_BS),
        "token_type_ids": torch.from_numpy(kinds_BS),
        "labels": torch.from_numpy(labels_BS),
        "sentence_order_label": torch.tensor([row.label for row in rows], dtype=torch.int64),
    }


def _stored(sample: Sample, seq_length: int, vocabulary: Vocabulary, rng: random.Random) -> StoredSample:
    """A sample ready for a batch. One of plain text is cut, perhaps swapped, and encoded."""
    if isinstance(sample, StoredSample):
        return sample
    pair = truncated(ordered_pair(sample, rng), seq_length)
    row = encoded(pair, vocabulary)
    return StoredSample(
        np.array(row.input_ids), np.array(row.token_type_ids), np.array(row.special_tokens_mask), pair.label
    )


def mask_tokens(
    ids: Sequence[int], ordinary: Sequence[int], probability: float, vocabulary: Vocabulary, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Choose the tokens that the model must guess: ``probability`` of the ordinary ones, rounded, but at least one.

    Of these 80% become ``[MASK]``, 10% a random ordinary token, and 10% stay as they are.

    Args:
        ordinary: positions of tokens that are not special.
    Returns:
        The model's input, and the labels: the true token where the model must guess, ``IGNORED`` elsewhere.
    """
    seen = list(ids)
    labels = [IGNORED] * len(ids)
    num_masked = min(len(ordinary), max(1, round(probability * len(ordinary))))
    for position in rng.sample(ordinary, num_masked):
        labels[position] = ids[position]
        chance = rng.random()
        if chance < 0.8:
            seen[position] = vocabulary.mask
        elif chance < 0.9:
            seen[position] = _random_token(vocabulary, rng)
    return seen, labels


def _random_token(vocabulary: Vocabulary, rng: random.Random) -> int:
    special = vocabulary.special
    while True:
        if (token := rng.randrange(vocabulary.size)) not in special:
            return token


def endless_order(samples: Sequence[Sample] | SampleStream, rng: random.Random) -> Iterator[Sample]:
    """Every sample once in an order drawn from ``rng``, then again in another one. Takes 4 bytes for each sample.

    Samples of a stream come shard by shard.
    """
    while True:
        here = samples if isinstance(samples, Sequence) else samples.samples
        order = np.random.default_rng(rng.getrandbits(64)).permutation(np.arange(len(here), dtype=np.uint32))
        for index in order:
            yield here[int(index)]
        if not isinstance(samples, Sequence):
            samples.advance()
