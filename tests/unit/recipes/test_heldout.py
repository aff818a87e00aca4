"""The held-out loss before and after, also when there is little time."""

from __future__ import annotations

import pytest
import torch

from manyhands.recipes.albert.batches import heldout_batch
from manyhands.recipes.albert.heldout import PART_SIZE, HeldoutComparison
from manyhands.recipes.albert.model import build_model, heldout_loss


@pytest.fixture
def model(recipe, tokenizer):
    return build_model(recipe, len(tokenizer))


@pytest.fixture
def comparison(model, samples, recipe):
    return HeldoutComparison(model, heldout_batch(samples, recipe))


def test_the_parts_give_the_loss_of_the_whole(comparison, model, samples, recipe):
    whole = heldout_loss(model, heldout_batch(samples, recipe))
    assert comparison.begin() == pytest.approx(whole, rel=1e-5)
    assert comparison.loss() == pytest.approx(whole, rel=1e-5)


def test_without_time_the_same_few_samples_are_compared(comparison, model, recipe):
    comparison.begin()
    in_no_time, in_time = comparison.compare(-1.0), comparison.compare(60.0)
    assert (in_no_time.num_samples, in_time.num_samples) == (PART_SIZE, recipe.num_heldout)
    assert in_no_time.before == pytest.approx(in_no_time.after)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    changed = comparison.compare(-1.0)
    assert changed.before == in_no_time.before
    assert changed.after != pytest.approx(changed.before, abs=1e-3)


def test_a_trainer_that_was_stopped_before_it_began_compares_nothing(comparison):
    assert comparison.compare(60.0) is None
