from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from manyhands.runtime import interrupts
from manyhands.runtime.interrupts import SIGNALS, uninterrupted

HANDLED = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What a handler was called with that raises, as the commands have it."""
    heard: list[int] = []

    def raise_it(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, raise_it) for number in HANDLED}
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", HANDLED)
def test_a_signal_waits_until_the_block_is_over(number: signal.Signals, heard: list[int]) -> None:
    before, lines = [signal.getsignal(one) for one in SIGNALS], []

    @uninterrupted()
    def work() -> None:
        signal.raise_signal(number)
        lines.append("after it")
        assert not heard

    with pytest.raises(KeyboardInterrupt):
        work()
    assert lines
    assert heard == [number]
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_without_a_signal_nothing_happens(heard: list[int]) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with uninterrupted():
        pass
    assert not heard
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_a_repeated_signal_ends_a_block_that_hangs(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    lines, now = [], 100.0
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now)

    @uninterrupted()
    def work() -> None:
        nonlocal now
        for seconds, line in ((0.0, "first"), (0.5, "the same, sent twice"), (0.7, "again")):
            now += seconds
            signal.raise_signal(signal.SIGINT)
            lines.append(line)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert lines == ["first", "the same, sent twice"]
    assert heard == [signal.SIGINT]


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="there is no such signal")
@pytest.mark.parametrize("order", [("SIGINT", "SIGUSR1"), ("SIGUSR1", "SIGINT"), ("SIGTERM", "SIGUSR1", "SIGINT")])
def test_no_signal_is_lost_when_several_come(heard: list[int], order: tuple[str, ...]) -> None:
    """Schedulers ask for a checkpoint by a signal, and end the program by another."""
    noted, lines = [], []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: noted.append(number))

    @uninterrupted()
    def work() -> None:
        for name in order:
            signal.raise_signal(getattr(signal, name))
            lines.append(name)

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert lines == list(order), "none of them broke it off"
    assert noted == [signal.SIGUSR1]
    assert heard == [getattr(signal, name) for name in order if name != "SIGUSR1"]


def test_a_handler_that_has_others_ignored_is_obeyed() -> None:
    """As that of the commands, which leave once and undisturbed."""

    def ignore_all(number: int, frame: FrameType | None) -> None:
        for other in HANDLED:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    @uninterrupted()
    def work() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    before = {number: signal.signal(number, ignore_all) for number in HANDLED}
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert [signal.getsignal(number) for number in HANDLED] == [signal.SIG_IGN] * 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_error_of_the_block_is_not_lost(heard: list[int]) -> None:
    @uninterrupted()
    def work(*, is_interrupted: bool) -> None:
        if is_interrupted:
            signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work(is_interrupted=False)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        work(is_interrupted=True)
    assert isinstance(interrupt.value.__context__, ZeroDivisionError)


def test_a_signal_in_a_nested_block_waits_for_the_outer_one(heard: list[int]) -> None:
    lines = []

    @uninterrupted()
    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        lines.append("after the inner one")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert lines
    assert heard == [signal.SIGINT]


def test_a_signal_that_comes_as_the_handlers_are_put_back(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    put_back, real = [], signal.signal

    def interrupted(number: int, handler: object) -> object:
        result = real(number, handler)  # type: ignore[arg-type]
        put_back.append(number)
        if put_back.count(signal.SIGTERM) == 2 and number == signal.SIGTERM:  # SIGINT comes after it
            signal.raise_signal(number)
        return result

    before = [signal.getsignal(one) for one in SIGNALS]
    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        pass
    monkeypatch.undo()
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_a_block_in_another_thread_runs_without_signal_handling(heard: list[int]) -> None:
    lines = []

    def block() -> None:
        with uninterrupted():
            lines.append("here")

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert lines
