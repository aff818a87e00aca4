from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch

from manyhands.optim import Lamb
from manyhands.recipes.albert.batches import Batches, heldout_batch
from manyhands.recipes.albert.model import build_model, heldout_loss, loss_of, parameter_groups, warmup_linear
from manyhands.recipes.albert.optimizer import build_optimizer


@pytest.fixture
def model(recipe, tokenizer):
    return build_model(recipe, len(tokenizer))


def gradients(model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def rows(batch, start: int, end: int):
    return {name: tensor[start:end] for name, tensor in batch.items()}


def test_peers_start_equal_and_the_callers_random_state_is_left_alone(recipe, tokenizer):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model(recipe, len(tokenizer))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = build_model(recipe, len(tokenizer))
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert first.training


def test_an_untrained_model_guesses_evenly(model, samples, recipe):
    even = math.log(recipe.vocab_size) + math.log(2)
    assert heldout_loss(model, heldout_batch(samples, recipe)) == pytest.approx(even, rel=0.05)


@pytest.mark.parametrize("sizes", [(1, 5), (2, 4), (3, 3)])
def test_the_loss_of_a_batch_is_the_mean_of_its_parts_weighted_by_samples(model, samples, recipe, sizes):
    model.double()
    batch = next(Batches(samples, recipe, "peer"))
    whole = loss_of(model, batch)
    whole.backward()
    expected = gradients(model)
    model.zero_grad()

    first, second = sizes
    parts = [loss_of(model, rows(batch, 0, first)), loss_of(model, rows(batch, first, first + second))]
    mean = (parts[0] * first + parts[1] * second) / (first + second)
    mean.backward()
    assert mean.item() == pytest.approx(whole.item(), abs=1e-12)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)


def test_heldout_loss_changes_nothing(model, samples, recipe):
    batch = heldout_batch(samples, recipe)
    for training in (True, False):
        model.train(training)
        assert heldout_loss(model, batch) == heldout_loss(model, batch)
        assert model.training is training
        assert all(parameter.grad is None for parameter in model.parameters())


def test_training_lowers_the_heldout_loss(model, samples, recipe):
    held_out = heldout_batch(samples, recipe)
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe.weight_decay), lr=1e-2)
    before = heldout_loss(model, held_out)
    for batch in islice(Batches(samples, recipe, "peer"), 30):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert heldout_loss(model, held_out) < before - 0.3


def test_the_recipe_trains_with_lamb_as_collaborative_albert_does(model, samples, recipe):
    held_out, recipe = heldout_batch(samples, recipe), replace(recipe, learning_rate=0.03, weight_decay=0.02)
    optimizer = build_optimizer(model, recipe)
    assert isinstance(optimizer, Lamb)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.02, 0.0]
    for group in optimizer.param_groups:
        settings = {name: group[name] for name in ("lr", "betas", "eps", "clamp_value", "debias")}
        assert settings == {"lr": 0.03, "betas": (0.9, 0.999), "eps": 1e-6, "clamp_value": 10_000.0, "debias": True}
    before = heldout_loss(model, held_out)
    for batch in islice(Batches(samples, recipe, "peer"), 30):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert heldout_loss(model, held_out) < before - 0.3


def test_biases_and_layer_norms_do_not_decay(model):
    decaying, exempt = parameter_groups(model, 0.1)
    assert decaying["weight_decay"] == 0.1
    assert exempt["weight_decay"] == 0.0
    assert all(name.endswith("bias") or "norm" in name.lower() for name, _ in exempt["params"])
    assert all(name.endswith("weight") and "norm" not in name.lower() for name, _ in decaying["params"])
    named = dict(model.named_parameters())
    assert {name: id(p) for name, p in exempt["params"] + decaying["params"]} == {n: id(p) for n, p in named.items()}


def test_warmup_linear_rises_to_one_and_falls_to_zero():
    factor = warmup_linear(total_steps=10, warmup_steps=4)
    assert [factor(step) for step in (0, 1, 3, 4)] == [0.25, 0.5, 1.0, 1.0]
    assert factor(7) == 0.5
    assert factor(10) == factor(1000) == 0.0
    assert warmup_linear(total_steps=10, warmup_steps=0)(0) == 1.0

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    assert optimizer.param_groups[0]["lr"] == 0.5
