"""Models by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.memory import num_parameters
from manyhands.recipes.albert.presets import model_settings

LARGE = {
    "model_type": "albert", "hidden_act": "gelu_new", "num_hidden_groups": 1, "inner_group_num": 1,
    "type_vocab_size": 2, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "vocab_size": 30000,
    "embedding_size": 128, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "max_position_embeddings": 512, "classifier_dropout_prob": 0.1,
}  # fmt: skip


def write(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**LARGE, **changes}))
    return path


def test_the_small_model_is_the_default() -> None:
    assert AlbertRecipe(**model_settings("small")) == AlbertRecipe()


def test_the_large_model_has_the_size_that_its_paper_says() -> None:
    """Source: Lan et al., ALBERT, arXiv:1909.11942, table 1: 18 million parameters."""
    recipe = AlbertRecipe(**model_settings("albert-large-v2"), seq_length=512)
    assert num_parameters(recipe, recipe.vocab_size) == pytest.approx(18e6, rel=0.05)


@pytest.mark.parametrize("name", ["albert/albert-large-v2", "albert-large-v2"])
def test_the_name_on_the_hub_and_a_file_of_it_are_the_same_model(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "config.json")
    assert model_settings(name) == model_settings(str(path)) == model_settings(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type is 'bert'; this recipe trains models with 'albert' alone"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_hidden_groups": 2}, "num_hidden_groups is 2"),
        ({"hidden_size": "wide"}, "must have a whole number above 0 for hidden_size"),
        (
            {"vocab_size": 0, "num_hidden_layers": None},
            "must have a whole number above 0 for vocab_size, num_hidden_layers",
        ),
    ],
)
def test_a_model_that_the_recipe_cannot_build_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        model_settings(str(write(tmp_path / "config.json", **changes)))


@pytest.mark.parametrize(("text", "message"), [(None, "no such model"), ("{", "cannot be read as a config.json")])
def test_a_model_file_that_is_missing_or_malformed_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        model_settings(str(path))
