from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.batches import (
    IGNORED,
    IN_ORDER,
    SWAPPED,
    Batches,
    heldout_batch,
    mask_tokens,
    ordered_pair,
    truncated_pair,
)
from manyhands.recipes.albert.samples import cut_samples, make_samples
from manyhands.recipes.albert.tokenizer import CLS_ID, MASK_ID, PAD_ID, SEP_ID

SENTENCES = st.lists(st.lists(st.integers(5, 99), max_size=40), max_size=20)


def unmasked(batch):
    return torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])


def same(first, second) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@given(SENTENCES, st.integers(16, 40))
def test_samples_are_consecutive_and_can_be_cut_and_masked(sentences, seq_length):
    samples = list(cut_samples(sentences, seq_length))
    tokens = list(chain.from_iterable(sentences))
    in_samples = [token for sample in samples for sentence in sample for token in sentence]
    assert tokens[: len(in_samples)] == in_samples
    assert len(tokens) - len(in_samples) < seq_length  # only the end of a document is ever dropped
    for sample in samples:
        assert len(sample) >= 2
        assert seq_length // 2 <= sum(map(len, sample)) < seq_length * 3 // 2
        assert all(sample)


@given(st.lists(st.just(7), min_size=1, max_size=30), st.lists(st.just(8), min_size=1, max_size=30), st.integers(4, 40))
def test_the_longer_segment_is_shortened_first(first, second, max_tokens):
    expected_first, expected_second = list(first), list(second)
    while len(expected_first) + len(expected_second) > max_tokens:
        (expected_first if len(expected_first) >= len(expected_second) else expected_second).pop()
    assert truncated_pair(first, second, max_tokens) == (expected_first, expected_second)


def test_the_order_label_says_whether_the_segments_were_swapped():
    sample = [[10, 11], [12], [13, 14]]
    seen = {SWAPPED: 0, IN_ORDER: 0}
    for seed in range(400):
        first, second, label = ordered_pair(sample, random.Random(seed))
        assert (second + first if label == SWAPPED else first + second) == [10, 11, 12, 13, 14]
        assert first
        assert second
        seen[label] += 1
    assert 150 < seen[SWAPPED] < 250


def test_masking_is_80_10_10_and_leaves_special_tokens_alone():
    ids = [CLS_ID, *range(100, 140), SEP_ID, *range(200, 240), SEP_ID]
    num_kept = num_mask = num_random = 0
    for seed in range(200):
        seen, labels = mask_tokens(ids, 10, 600, random.Random(seed))
        guessed = [position for position, label in enumerate(labels) if label != IGNORED]
        assert len(guessed) == 10
        assert all(seen[position] == token for position, token in enumerate(ids) if position not in guessed)
        for position in guessed:
            assert labels[position] == ids[position] >= 100
            assert seen[position] == MASK_ID or 5 <= seen[position] < 600
            num_mask += seen[position] == MASK_ID
            num_kept += seen[position] == ids[position]
            num_random += seen[position] not in (MASK_ID, ids[position])
    assert 1500 < num_mask < 1700
    assert 140 < num_kept < 260
    assert 140 < num_random < 260


def test_a_batch_has_the_shapes_and_meaning_that_albert_expects(samples, recipe):
    for batch in islice(Batches(samples, recipe, "peer"), 20):
        for name in ("input_ids", "attention_mask", "token_type_ids", "labels"):
            assert batch[name].shape == (recipe.batch_size, recipe.seq_length)
            assert batch[name].dtype == torch.int64
        assert batch["sentence_order_label"].shape == (recipe.batch_size,)
        for row, mask, kinds in zip(
            unmasked(batch).tolist(), batch["attention_mask"].tolist(), batch["token_type_ids"].tolist(), strict=True
        ):
            length = sum(mask)
            assert mask == [1] * length + [0] * (recipe.seq_length - length)
            assert row[length:] == [PAD_ID] * (recipe.seq_length - length)
            assert row[0] == CLS_ID
            first_end, second_end = (position for position, token in enumerate(row) if token == SEP_ID)
            assert second_end == length - 1
            assert kinds[:length] == [0] * (first_end + 1) + [1] * (length - first_end - 1)


def test_every_sample_has_equally_many_masked_tokens_short_ones_too(samples, recipe):
    lengths = set()
    for batch in [heldout_batch(samples, recipe), *islice(Batches(samples, recipe, "peer"), 200)]:
        assert (batch["labels"] != IGNORED).sum(dim=1).unique().tolist() == [recipe.num_masked]
        lengths.update(batch["attention_mask"].sum(dim=1).tolist())
    assert len(lengths) > 1


def test_the_same_peer_gets_the_same_batches_and_another_peer_others(samples, recipe):
    first, again = Batches(samples, recipe, "peer-1"), Batches(samples, recipe, "peer-1")
    other, reseeded = Batches(samples, recipe, "peer-2"), Batches(samples, replace(recipe, seed=1), "peer-1")
    for _ in range(5):
        batch = next(first)
        assert same(batch, next(again))
        assert not same(batch, next(other))
        assert not same(batch, next(reseeded))


def test_every_sample_comes_once_in_each_pass_with_new_masks(documents, tokenizer, recipe):
    samples = make_samples(documents, tokenizer, recipe)
    recipe = replace(recipe, batch_size=len(samples.training))
    batches = Batches(samples, recipe, "peer")
    passes = [next(batches), next(batches)]
    kept = [sorted(sorted(row) for row in unmasked(batch).tolist()) for batch in passes]
    whole = [row for row in kept[0] if row in kept[1]]
    assert len(whole) > 0.2 * len(samples.training)  # the others were cut elsewhere and shortened at another end
    assert not torch.equal(passes[0]["input_ids"], passes[1]["input_ids"])


def test_heldout_samples_are_the_same_for_all_and_never_trained_on(documents, tokenizer, samples, recipe):
    again = make_samples(documents, tokenizer, replace(recipe, batch_size=recipe.batch_size + 1))
    assert again.heldout == samples.heldout
    assert same(heldout_batch(samples, recipe), heldout_batch(again, recipe))
    assert len(samples.heldout) == recipe.num_heldout

    documents_of = {}
    for index, document in enumerate(documents):
        encoded = tokenizer(document, add_special_tokens=False)["input_ids"]
        for sample in cut_samples(encoded, recipe.seq_length):
            documents_of.setdefault(str(sample), set()).add(index)
    heldout = set().union(*(documents_of[str(sample)] for sample in samples.heldout))
    training = set().union(*(documents_of[str(sample)] for sample in samples.training))
    assert heldout
    assert not heldout & training
    assert heldout | training == set(range(len(documents)))


def test_too_short_a_text_says_how_many_samples_there_are_and_are_needed(tokenizer, recipe):
    documents = [["This is the first sentence of it.", "And this is quite another sentence, a longer one."] * 3] * 2
    with pytest.raises(ConfigError, match=r"gives 0 samples of 32 tokens for training and \d+ .* at least 6 .* 40 "):
        make_samples(documents, tokenizer, recipe)


def test_text_that_spells_special_tokens_is_ordinary_text(tokenizer, recipe):
    documents = [["The [MASK] of <pad> is [SEP] never a real [CLS] token, is it?"] * 40] * 3
    samples = make_samples(documents, tokenizer, replace(recipe, num_heldout=4))
    assert min(token for sample in samples.training for sentence in sample for token in sentence) >= 5
