"""While a peer is there, threads take short turns with Python's lock."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from manyhands.runtime import LoopThread
from manyhands.runtime.switch_interval import INTERVAL_S, SwitchInterval


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


async def interval() -> float:
    return sys.getswitchinterval()


def test_the_switch_interval_is_short_while_a_network_thread_runs() -> None:
    sys.setswitchinterval(0.005)
    one, other = LoopThread(), LoopThread()
    for thread in (one, other):
        assert thread.run(interval(), 5.0, "looking") == pytest.approx(INTERVAL_S, abs=3e-6)
    one.close()
    assert sys.getswitchinterval() == pytest.approx(INTERVAL_S, abs=3e-6)
    other.close()
    assert sys.getswitchinterval() == pytest.approx(0.005, abs=3e-6)


@pytest.mark.parametrize("shorter_s", [0.0001, 0.002])
def test_an_interval_that_the_program_has_set_meanwhile_stays(shorter_s: float) -> None:
    interval = SwitchInterval()
    interval.shorten()
    sys.setswitchinterval(shorter_s)
    interval.restore()
    assert sys.getswitchinterval() == pytest.approx(shorter_s, abs=3e-6)


def test_an_interval_that_is_shorter_already_stays() -> None:
    sys.setswitchinterval(0.0001)
    interval = SwitchInterval()
    interval.shorten()
    assert sys.getswitchinterval() == pytest.approx(0.0001, abs=3e-6)
    interval.restore()
    assert sys.getswitchinterval() == pytest.approx(0.0001, abs=3e-6)
