from __future__ import annotations

import pytest

from manyhands.runtime.exit_delay import delay_exit, exit_delay_s


def test_the_exit_delay_is_the_longest_time_that_running_work_asks_for() -> None:
    assert exit_delay_s() == 0.0
    with delay_exit(50.0):
        assert 40 < exit_delay_s() <= 50
        with pytest.raises(OSError, match="disk"), delay_exit(500.0):  # noqa: PT012
            assert exit_delay_s() > 400
            raise OSError("the disk is full")
        assert exit_delay_s() <= 50
    assert exit_delay_s() == 0.0
    with delay_exit(-1.0):
        assert exit_delay_s() < 0 or exit_delay_s() == 0.0, "it has had its time"
