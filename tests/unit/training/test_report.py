"""What a trainer logs of a global step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.training.report import report_step


@pytest.mark.parametrize(("speed", "lines"), [(0.0, []), (31.25, ["Performance: 31.250 samples/sec"])])
def test_a_speed_that_is_not_known_yet_is_not_told_as_zero(
    speed: float, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "manyhands")
    optimizer: Any = SimpleNamespace(last_contribution=4, samples_per_second=speed, global_step=1)
    report_step(optimizer, [], 0.0)
    assert caplog.messages == ["Step 1", "Your current contribution: 4 samples", *lines]
