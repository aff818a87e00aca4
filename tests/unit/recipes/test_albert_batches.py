from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, islice

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.batches import (
    IGNORED,
    Batches,
    heldout_batch,
    mask_tokens,
)
from manyhands.recipes.albert.data.pairs import IN_ORDER, SWAPPED, Pair, encoded, ordered_pair, truncated
from manyhands.recipes.albert.data.samples import cut_samples, make_samples
from manyhands.recipes.albert.data.tokenizer_file import Vocabulary
from manyhands.recipes.albert.model import CLS_ID, PAD_ID, SEP_ID

WORDS = {word: number for number, word in enumerate(["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "a", "b"])}
VOCABULARY = Vocabulary(size=len(WORDS), pad=0, unknown=1, cls=2, sep=3, mask=4)
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


def library_pair(first: str, second: str, seq_length: int) -> list[int]:
    """A pair as ``tokenizers`` truncates and encodes it."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", WORDS["[CLS]"]), ("[SEP]", WORDS["[SEP]"])],
    )
    backend.enable_truncation(seq_length, strategy="longest_first")
    return backend.encode(first, second).ids


@given(st.integers(1, 40), st.integers(1, 40), st.integers(8, 60))
def test_a_pair_is_shortened_as_the_library_of_tokenizers_does(num_first, num_second, seq_length):
    pair = truncated(Pair([WORDS["a"]] * num_first, [WORDS["b"]] * num_second, IN_ORDER), seq_length)
    assert encoded(pair, VOCABULARY).input_ids == library_pair("a " * num_first, "b " * num_second, seq_length)


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
    vocabulary = Vocabulary(size=600, pad=300, unknown=301, cls=302, sep=303, mask=304)
    ids = [302, *range(100, 140), 303, *range(200, 240), 303]
    ordinary = [position for position, token in enumerate(ids) if token < 300]
    num_kept = num_mask = num_random = 0
    for seed in range(200):
        seen, labels = mask_tokens(ids, ordinary, 0.125, vocabulary, random.Random(seed))
        guessed = [position for position, label in enumerate(labels) if label != IGNORED]
        assert len(guessed) == 10
        assert all(seen[position] == token for position, token in enumerate(ids) if position not in guessed)
        for position in guessed:
            assert labels[position] == ids[position] < 300
            assert seen[position] not in (300, 301, 302, 303)
            num_mask += seen[position] == 304
            num_kept += seen[position] == ids[position]
            num_random += seen[position] not in (304, ids[position])
    assert 1500 < num_mask < 1700
    assert 140 < num_kept < 260
    assert 140 < num_random < 260


def test_the_stated_share_of_each_sample_is_masked_but_at_least_one_token(samples, recipe):
    numbers = set()
    for batch in [heldout_batch(samples, recipe), *islice(Batches(samples, recipe, "peer"), 200)]:
        num_ordinary = batch["attention_mask"].sum(dim=1) - 3
        expected = [max(1, round(0.15 * int(number))) for number in num_ordinary]
        assert (batch["labels"] != IGNORED).sum(dim=1).tolist() == expected
        numbers.update(expected)
    assert len(numbers) > 1
    short = [302, 5, 303, 6, 303]
    _, labels = mask_tokens(short, [1, 3], 0.15, VOCABULARY, random.Random(0))
    assert sum(label != IGNORED for label in labels) == 1


def test_a_batch_has_the_shapes_and_meaning_that_albert_expects(samples, recipe):
    for batch in islice(Batches(samples, recipe, "peer"), 20):
        num_columns = batch["input_ids"].shape[1]
        longest = int(batch["attention_mask"].sum(dim=1).max())
        assert longest <= num_columns <= min(longest + 7, recipe.seq_length), "the padding is longer than it must be"
        for name in ("input_ids", "attention_mask", "token_type_ids", "labels"):
            assert batch[name].shape == (recipe.batch_size, num_columns)
            assert batch[name].dtype == torch.int64
        assert batch["sentence_order_label"].shape == (recipe.batch_size,)
        for row, mask, kinds in zip(
            unmasked(batch).tolist(), batch["attention_mask"].tolist(), batch["token_type_ids"].tolist(), strict=True
        ):
            length = sum(mask)
            assert mask == [1] * length + [0] * (num_columns - length)
            assert row[length:] == [PAD_ID] * (num_columns - length)
            assert row[0] == CLS_ID
            first_end, second_end = (position for position, token in enumerate(row) if token == SEP_ID)
            assert second_end == length - 1
            assert kinds[:length] == [0] * (first_end + 1) + [1] * (length - first_end - 1)


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
