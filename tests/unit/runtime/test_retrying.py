"""A link that is cut while a peer joins ends nothing for good."""

from __future__ import annotations

import pytest

from manyhands.base.errors import ConfigError, Timeout, Unavailable
from manyhands.runtime.retrying import until_reached


def test_an_attempt_is_repeated_until_others_are_reached(caplog: pytest.LogCaptureFixture) -> None:
    waits: list[float] = []

    def join() -> str:
        if len(waits) < 7:
            raise Timeout("for an answer", 5.0) if len(waits) % 2 else Unavailable("nobody answers")
        return "joined"

    assert until_reached(join, waits.append, "joining run 'albert'") == "joined"
    assert waits == [2, 4, 8, 16, 32, 60, 60]
    assert "joining run 'albert' has failed: nobody answers; trying again in 2 s" in caplog.text


def test_a_config_error_is_not_retried() -> None:
    def join() -> None:
        raise ConfigError("learning_rate differs")

    with pytest.raises(ConfigError):
        until_reached(join, lambda seconds: pytest.fail("it waits"), "joining")
