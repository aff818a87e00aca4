"""The recipe of a run that this peer begins."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.cli.taking_part import OwnFolders, _recipe_to_begin
from manyhands.recipes.albert.settings import TrainingSettings


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"local_steps": True}, "--target-batch-size 256 and --learning-rate 0.01. The defaults suit synchronous"),
        ({"local_steps": True, "target_batch_size": 8192}, "--target-batch-size 8192 and --learning-rate 0.01. The"),
        ({"local_steps": True, "learning_rate": 0.003}, "--target-batch-size 256 and --learning-rate 0.003. The"),
        ({"local_steps": True, "target_batch_size": 256, "learning_rate": 0.01}, None),
        ({}, None),
    ],
)
def test_local_steps_with_defaults_for_synchronous_ones_are_named(
    given: dict[str, Any], shown: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    _recipe_to_begin("run", TrainingSettings(), given, OwnFolders(None, None))
    lines = [record.message for record in caplog.records]
    assert len(lines) == (shown is not None), lines
    assert shown is None or shown in lines[0]
