"""The periods of the heartbeat."""

import pytest

from manyhands.base.errors import ConfigError
from manyhands.rpc import RpcConfig
from manyhands.rpc.pool import LOOKS_IN_A_PERIOD


def test_by_default_a_frozen_peer_is_noticed_in_under_10_s() -> None:
    config = RpcConfig()
    assert config.heartbeat_timeout_s + config.heartbeat_period_s / LOOKS_IN_A_PERIOD < 10


@pytest.mark.parametrize(("period_s", "timeout_s"), [(0, 7), (-1, 7), (7, 7), (8, 7)])
def test_heartbeat_periods_that_cannot_work_are_refused(period_s: float, timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="the timeout must be longer than the period; for example"):
        RpcConfig(heartbeat_period_s=period_s, heartbeat_timeout_s=timeout_s)
