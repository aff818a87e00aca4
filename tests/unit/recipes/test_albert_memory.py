from __future__ import annotations

import pytest

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.memory import available_bytes, check_memory, num_parameters
from manyhands.recipes.albert.model import build_model


def test_the_parameters_are_those_of_the_model(recipe: AlbertRecipe) -> None:
    model = build_model(recipe, 555)
    assert num_parameters(recipe, 555) == sum(parameter.numel() for parameter in model.parameters())


def test_a_small_model_fits_and_a_huge_one_is_refused_with_what_it_needs(recipe: AlbertRecipe) -> None:
    assert available_bytes() > 0
    check_memory("run", recipe, 555)
    huge = AlbertRecipe(hidden_size=1 << 18, intermediate_size=1 << 20)
    message = r"too little memory for the model of run 'run': its \d+\.\d million parameters need about \d+\.\d GB"
    with pytest.raises(ConfigError, match=message):
        check_memory("run", huge, 30_000)
