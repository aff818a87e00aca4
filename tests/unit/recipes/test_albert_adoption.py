"""A newcomer takes over the recipe of a run, and is told what it asked for in vain."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from manyhands.base.errors import ConfigError, ManifestMismatch
from manyhands.recipes.albert.adoption import RunRecipe, adopted, facts_of
from manyhands.recipes.albert.config import AlbertRecipe

RECIPE = AlbertRecipe(
    vocab_size=600, seq_length=32, hidden_size=48, num_attention_heads=3, learning_rate=0.00176, target_batch_size=64,
    batch_size=4, seed=5, mask_probability=0.2, aggregate="centered_clip",
)  # fmt: skip
FACTS = facts_of(RunRecipe(recipe=RECIPE, tokenizer="digest", vocab_size=555))


def test_all_settings_but_those_of_this_peer_come_from_the_run() -> None:
    own = {"text": (Path("a.txt"),), "batch_size": 16, "seed": 7}
    expected = RunRecipe(recipe=replace(RECIPE, **own), tokenizer="digest", vocab_size=555)
    assert adopted("run", FACTS, own) == expected
    assert adopted("run", FACTS, {**own, "hidden_size": 48, "learning_rate": 0.00176}) == expected


def test_whether_steps_are_local_follows_from_the_fact_that_the_optimizer_adds() -> None:
    assert not adopted("run", FACTS, {}).recipe.local_steps
    facts = FACTS | {"local_steps": "outer SGD(lr=0.7), 1 fragment, overlap_steps=0"}
    assert adopted("run", facts, {"local_steps": True}).recipe.local_steps
    synchronous = "local_steps is True here, False in the run, which has synchronous steps: leave --local-steps out$"
    with pytest.raises(ManifestMismatch, match=synchronous):
        adopted("run", FACTS, {"local_steps": True})


def test_options_that_differ_from_the_run_are_named_with_both_values() -> None:
    with pytest.raises(ManifestMismatch) as error:
        adopted("run", FACTS, {"learning_rate": 0.1, "hidden_size": 512, "target_batch_size": 64})
    assert error.value.differences == [
        "hidden_size is 512 here, 48 in the run",
        "learning_rate is 0.1 here, 0.00176 in the run",
    ]


def test_the_recipe_of_a_peer_that_adopted_it_is_the_same() -> None:
    run = adopted("run", FACTS, {"batch_size": 2, "seed": 9})
    assert facts_of(run) == FACTS


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, "was begun by another program"),
        ({**FACTS, "recipe": "albert 2"}, "trains recipe 'albert 2', which this version does not know"),
        ({**FACTS, "recipe": "\x1b[2J"}, "trains recipe '?[2J'"),
        ({**FACTS, "hidden_size": "many"}, "the recipe of run 'run' cannot be used"),
        ({**FACTS, "hidden_size": str(4 * 10**200)}, "hidden_size is out of bounds: it must be from -1000000000 to"),
        ({**FACTS, "aggregate": "\x1b[2J"}, "cannot be used: aggregate '\\x1b[2J' is unknown"),
        ({**FACTS, "vocabulary": "-4096"}, "vocabulary is out of bounds: it must be from 1 to 1000000000"),
        ({**FACTS, "hidden_size": "-3"}, "the recipe of run 'run' cannot be used"),
        ({name: value for name, value in FACTS.items() if name != "seq_length"}, "cannot be used"),
    ],
)
def test_recipes_of_a_run_that_cannot_be_used_are_refused(facts: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        adopted("run", facts, {})


def test_a_wrong_setting_of_this_peer_is_named_as_its_own() -> None:
    with pytest.raises(ConfigError, match="batch_size is 0"):
        adopted("run", FACTS, {"batch_size": 0})
