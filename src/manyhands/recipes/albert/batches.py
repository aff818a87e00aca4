"""Batches for masked language modelling and sentence-order prediction.

Every time that a sample is drawn, it is cut, perhaps swapped, and masked afresh (dynamic masking).

Every sample has *equally many* masked tokens, ``recipe.num_masked``. The loss of a batch is the mean over its masked
tokens; with the same number in each sample that is the mean over its samples. Only then is the gradient of a large
batch equal to the average, weighted by samples, of the gradients that peers compute on parts of it. A mean over a
varying number of masked tokens is another function, for which no weights known before the masking are exact.

Source: Lan et al., ALBERT, arXiv:1909.11942, 3.1; Devlin et al., BERT, arXiv:1810.04805, for the 80/10/10 masking.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain

from manyhands.recipes.albert.config import NUM_PAIR_TOKENS, AlbertRecipe
from manyhands.recipes.albert.packages import torch
from manyhands.recipes.albert.samples import Sample, Samples, Sentence
from manyhands.recipes.albert.tokenizer import CLS_ID, MASK_ID, PAD_ID, SEP_ID, SPECIAL_TOKENS

IGNORED = -100
"""The label of a token that is not to be guessed."""

IN_ORDER, SWAPPED = 0, 1
"""The two sentence-order labels."""

Batch = dict[str, torch.Tensor]
"""int64: ``input_ids``, ``attention_mask``, ``token_type_ids`` and ``labels`` [B, S]; ``sentence_order_label`` [B]."""


class Batches(Iterator[Batch]):
    """The endless training batches of one peer: every sample once in an order of its own, then again in another.

    Args:
        samples: :attr:`Samples.training` is used.
        recipe: the one that made the samples; it gives ``batch_size`` (B), ``seq_length`` (S) and ``num_masked``.
        order: names the order: different ones give different orders of the samples and different masks, the same one
            with the same ``recipe.seed`` the same batches again.
    """

    def __init__(self, samples: Samples, recipe: AlbertRecipe, order: str) -> None:
        self._rng = random.Random(f"batches {recipe.seed} {order}")  # text is hashed with SHA-512
        self._encoder = _Encoder(recipe.seq_length, recipe.num_masked, samples.vocab_size)
        self._batch_size = recipe.batch_size
        self._order = _endless_order(samples.training, self._rng)

    def __next__(self) -> Batch:
        return self._encoder.batch([next(self._order) for _ in range(self._batch_size)], self._rng)


def heldout_batch(samples: Samples, recipe: AlbertRecipe) -> Batch:
    """All of :attr:`Samples.heldout` as one batch, cut and masked alike on every peer that has the same text."""
    encoder = _Encoder(recipe.seq_length, recipe.num_masked, samples.vocab_size)
    return encoder.batch(samples.heldout, random.Random("held-out batch"))


@dataclass(frozen=True, kw_only=True)
class _Instance:
    """One row of a batch: the fields are the names in :data:`Batch`."""

    input_ids: list[int]
    attention_mask: list[int]
    token_type_ids: list[int]
    labels: list[int]
    sentence_order_label: int


@dataclass(frozen=True)
class _Encoder:
    seq_length: int
    num_masked: int
    vocab_size: int

    def batch(self, samples: Iterable[Sample], rng: random.Random) -> Batch:
        instances = [self.instance(sample, rng) for sample in samples]
        return {
            field.name: torch.tensor([getattr(instance, field.name) for instance in instances], dtype=torch.int64)
            for field in fields(_Instance)
        }

    def instance(self, sample: Sample, rng: random.Random) -> _Instance:
        first, second, label = ordered_pair(sample, rng)
        first, second = truncated_pair(first, second, self.seq_length - NUM_PAIR_TOKENS)
        ids = [CLS_ID, *first, SEP_ID, *second, SEP_ID]
        seen, labels = mask_tokens(ids, self.num_masked, self.vocab_size, rng)
        num_pads = self.seq_length - len(ids)
        return _Instance(
            input_ids=seen + [PAD_ID] * num_pads,
            attention_mask=[1] * len(ids) + [0] * num_pads,
            token_type_ids=[0] * (len(first) + 2) + [1] * (len(second) + 1) + [0] * num_pads,
            labels=labels + [IGNORED] * num_pads,
            sentence_order_label=label,
        )


def ordered_pair(sample: Sample, rng: random.Random) -> tuple[Sentence, Sentence, int]:
    """Cut a sample between two of its sentences and swap the segments half of the time.

    Returns:
        The first segment, the second, and ``SWAPPED`` if the text has them the other way round, else ``IN_ORDER``.
    """
    cut = rng.randrange(1, len(sample))
    first, second = list(chain.from_iterable(sample[:cut])), list(chain.from_iterable(sample[cut:]))
    return (second, first, SWAPPED) if rng.random() < 0.5 else (first, second, IN_ORDER)


def truncated_pair(first: Sentence, second: Sentence, max_tokens: int) -> tuple[Sentence, Sentence]:
    """Shorten two segments at their ends to ``max_tokens`` together, the longer one first."""
    excess = max(0, len(first) + len(second) - max_tokens)
    from_longer = min(excess, abs(len(first) - len(second)))
    from_each, odd = divmod(excess - from_longer, 2)
    cut_first, cut_second = from_each + odd, from_each
    if len(first) >= len(second):
        cut_first += from_longer
    else:
        cut_second += from_longer
    return first[: len(first) - cut_first], second[: len(second) - cut_second]


def mask_tokens(
    ids: Sequence[int], num_masked: int, vocab_size: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Choose ``num_masked`` tokens that the model must guess, special tokens excepted.

    Of these 80% become ``[MASK]``, 10% a random ordinary token, and 10% stay as they are.

    Returns:
        What the model sees, and the labels: the true token where it must guess, ``IGNORED`` elsewhere.
    """
    ordinary = [position for position, token in enumerate(ids) if token >= len(SPECIAL_TOKENS)]
    seen, labels = list(ids), [IGNORED] * len(ids)
    for position in rng.sample(ordinary, num_masked):
        labels[position] = ids[position]
        chance = rng.random()
        if chance < 0.8:
            seen[position] = MASK_ID
        elif chance < 0.9:
            seen[position] = rng.randrange(len(SPECIAL_TOKENS), vocab_size)
    return seen, labels


def _endless_order(samples: Sequence[Sample], rng: random.Random) -> Iterator[Sample]:
    while True:
        yield from rng.sample(samples, len(samples))
