"""The held-out loss before and after, also when there is little time."""

from __future__ import annotations

import pytest
import torch

from manyhands.recipes.albert import heldout
from manyhands.recipes.albert.batches import IGNORED, heldout_batch
from manyhands.recipes.albert.compute import Compute
from manyhands.recipes.albert.heldout import PART_SIZE, PART_TOKENS, HeldoutComparison, parts_of, scores_of
from manyhands.recipes.albert.model import build_model, heldout_loss
from manyhands.recipes.albert.summary import HeldoutLosses


@pytest.fixture
def model(recipe, tokenizer):
    return build_model(recipe, len(tokenizer))


@pytest.fixture
def comparison(model, samples, recipe):
    return HeldoutComparison(model, heldout_batch(samples, recipe), 64, Compute("cpu", "float32"))


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


def test_a_summary_has_the_loss_that_was_logged_before(comparison, recipe):
    before, after = comparison.begin(), comparison.loss()
    assert comparison.compare(-1.0) == HeldoutLosses(before=before, after=after, num_samples=recipe.num_heldout)


def test_a_trainer_that_was_stopped_before_it_began_compares_nothing(comparison):
    assert comparison.compare(60.0) is None


def test_scores_are_those_of_the_whole_and_leave_the_model_as_it_was(model, samples, recipe):
    batch = heldout_batch(samples, recipe)
    scores = scores_of(model, batch)
    assert model.training
    model.train(False)
    with torch.no_grad():
        outputs = model(**batch)
    masked = batch["labels"] != IGNORED
    guessed = (outputs.prediction_logits.argmax(-1) == batch["labels"])[masked]
    in_order = outputs.sop_logits.argmax(-1) == batch["sentence_order_label"]
    assert scores.loss == pytest.approx(outputs.loss.item(), rel=1e-5)
    assert scores.mlm_accuracy == pytest.approx(guessed.float().mean().item())
    assert scores.sop_accuracy == pytest.approx(in_order.float().mean().item())
    assert scores.num_samples == recipe.num_heldout


def test_long_samples_are_computed_few_at_a_time():
    sizes = []
    batch = {name: torch.zeros(20, 300, dtype=torch.int64) for name in ("input_ids", "labels")}
    for part in parts_of(batch, 64):
        sizes.append(len(part["labels"]))
        assert part["labels"].numel() <= PART_TOKENS
    assert sizes == [3] * 6 + [2]


def test_parts_are_no_larger_than_a_training_batch_and_computed_in_its_precision(model, samples, recipe, monkeypatch):
    seen = []

    def heldout_loss(model, part):
        seen.append((len(part["labels"]), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return 1.0

    monkeypatch.setattr(heldout, "heldout_loss", heldout_loss)
    HeldoutComparison(model, heldout_batch(samples, recipe), 3, Compute("cpu", "bfloat16")).begin()
    assert max(size for size, _, _ in seen) == 3
    assert {(is_on, dtype) for _, is_on, dtype in seen} == {(True, torch.bfloat16)}


def test_half_precision_gives_about_the_same_loss(model, samples, recipe):
    batch = heldout_batch(samples, recipe)
    half = HeldoutComparison(model, batch, 4, Compute("cpu", "bfloat16")).begin()
    assert half == pytest.approx(HeldoutComparison(model, batch, 4, Compute("cpu", "float32")).begin(), rel=0.02)
