"""Settings of a wrong kind are named with their value and their rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from manyhands.averaging.config import AveragingConfig
from manyhands.base.arguments import number_of
from manyhands.base.errors import ConfigError
from manyhands.optim.config import ProgressConfig

NAN = float("nan")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"matchmaking_time_s": "5"}, "matchmaking_time_s='5' must be a finite number above 0; for example 15"),
        ({"averaging_timeout_s": None}, "averaging_timeout_s=None must be a finite number above 0; for example 60"),
        (
            {"averaging_timeout_s": float("inf")},
            "averaging_timeout_s=inf must be a finite number above 0; for example 60",
        ),
        ({"matchmaking_time_s": 60}, "matchmaking_time_s=60 and averaging_timeout_s=60.0: the search for a group must"),
        ({"max_group_size": None}, "max_group_size=None must be a whole number; for example 256"),
        ({"codec": None}, "codec None is unknown; one of auto, none"),
        (
            {"aggregate": "median"},
            "aggregate 'median' is unknown; one of clip, mean, centered_clip, for example",
        ),
        ({"aggregate": None}, "aggregate None is unknown; one of clip, mean, centered_clip"),
        ({"bandwidth_mbit_s": "100"}, "bandwidth_mbit_s='100' must be above 0 and at most"),
    ],
)
def test_averaging_settings_out_of_bounds_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        AveragingConfig(**given)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_refresh_s": "0.5"}, "min_refresh_s='0.5' must be a finite number above 0; for example 0.5"),
        ({"max_refresh_s": 0}, "max_refresh_s=0 must be a finite number above 0; for example 10"),
        ({"ttl_s": True}, "ttl_s=True must be a finite number above 0; for example 30"),
        ({"min_refresh_s": 20.0}, "min_refresh_s=20.0, max_refresh_s=10.0, ttl_s=30.0 must rise in this order"),
    ],
)
def test_progress_settings_out_of_bounds_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ProgressConfig(**given)
    assert message in str(error.value)


def test_numbers_of_other_libraries_are_numbers() -> None:
    assert AveragingConfig(matchmaking_time_s=np.float32(5), max_group_size=np.int64(40)).max_group_size == 40
    assert type(AveragingConfig(max_group_size=np.int64(40)).max_group_size) is int
    assert number_of(torch.tensor(2.5)) == 2.5
    assert all(number_of(value) != number_of(value) for value in ("2", True, None, [1], torch.zeros(2)))
