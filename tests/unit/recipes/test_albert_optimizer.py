"""What the settings of a trainer and of a recipe make of the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert import optimizer
from manyhands.recipes.albert.adoption import RunRecipe
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.optimizer import join_run
from manyhands.recipes.albert.settings import TrainingSettings, TuningSettings


def test_the_options_of_recipe_and_machine_reach_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(optimizer, "Optimizer", lambda inner, **options: made.update(options, inner=inner))
    recipe = AlbertRecipe(
        adam_epsilon=1e-5, clamp_value=7.0, max_grad_norm=2.0, max_group_size=32, weight_decay=0.3, learning_rate=0.02
    )
    tuning = TuningSettings(matchmaking_time_s=4.0, averaging_timeout_s=33.0, bandwidth_mbit_s=50.0, max_refresh_s=20.0)
    run = RunRecipe(recipe=recipe, tokenizer="digest", vocab_size=512)
    join_run(torch.nn.Linear(2, 2), run, None, "run", tuning)  # type: ignore[arg-type]
    rounds = made["averaging"]
    assert (rounds.matchmaking_time_s, rounds.averaging_timeout_s, rounds.bandwidth_mbit_s) == (4.0, 33.0, 50.0)
    assert rounds.max_group_size == 32
    assert made["progress"].max_refresh_s == 20.0
    assert made["max_grad_norm"] == 2.0
    options = made["inner"].param_groups[0]
    assert (options["eps"], options["clamp_value"], options["weight_decay"]) == (1e-5, 7.0, 0.3)


@pytest.mark.parametrize(
    "values",
    [
        {"max_refresh_s": 40.0},
        {"min_refresh_s": 0.0},
        {"metrics_ttl_s": -1.0},
        {"averaging_timeout_s": 5.0},
        {"bandwidth_mbit_s": 0.0},
    ],
)
def test_tuning_settings_out_of_bounds_are_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        TuningSettings(**values)


def test_a_stop_file_counts_from_when_its_number_is_there(tmp_path: Path) -> None:
    """A shell makes an empty file, and writes the number into it a moment later."""
    file = tmp_path / "stop"
    settings = TrainingSettings(stop_file=file, max_steps=9)
    assert settings.stop_step() == 9
    file.touch()
    assert settings.stop_step() == 9
    file.write_text("8\n")
    assert settings.stop_step() == 8
    file.write_text("soon\n")
    with pytest.raises(ConfigError, match="has 'soon'; it must have a global step"):
        settings.stop_step()
