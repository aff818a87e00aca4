"""A configuration of the DHT names the value that cannot be."""

from __future__ import annotations

import pytest

from manyhands.base.errors import ConfigError
from manyhands.dht.config import DhtConfig


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": 0},
        {"k": 65},
        {"replicas": 21},
        {"alpha": -1},
        {"request_timeout_s": float("nan")},
        {"refresh_period_s": float("inf")},
        {"max_requests_per_s_of_peer": 0},
        {"max_value_bytes": 65537},
    ],
)
def test_a_wrong_value_is_named(wrong: dict[str, float]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        DhtConfig(**wrong)  # type: ignore[arg-type]
