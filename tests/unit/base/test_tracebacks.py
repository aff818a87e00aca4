"""An error that is kept for its words keeps nothing else."""

from __future__ import annotations

import gc
import weakref

import pytest

from manyhands.base.tracebacks import clear_tracebacks


class Large:
    """What a frame works on."""


class Keeper:
    """Keeps an error, and is known to the frames that it went through."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.large: weakref.ref[Large] | None = None

    def work(self) -> None:
        large = Large()
        self.large = weakref.ref(large)
        try:
            self._fail(large)
        except KeyError as error:
            raise ValueError("the second one") from error

    def _fail(self, large: Large) -> None:
        try:
            raise OSError("the first one")
        except OSError:
            raise KeyError(large) from None  # which has the first one as its context

    def keep(self) -> None:
        try:
            self.work()
        except ValueError as error:
            self.error = clear_tracebacks(error)


def test_clearing_a_traceback_frees_its_frames_and_keeps_its_message() -> None:
    gc.collect()
    gc.disable()
    try:
        keeper = Keeper()
        keeper.keep()
        assert str(keeper.error) == "the second one"
        assert keeper.large is not None
        assert keeper.error is not None
        assert isinstance(keeper.error.__cause__, KeyError)
        keeper.error.__cause__.args = ()
        assert keeper.large() is None
        gone = weakref.ref(keeper)
        del keeper
        assert gone() is None
    finally:
        gc.enable()


def test_tracebacks_of_errors_with_circular_contexts_can_be_cleared() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    with pytest.raises(ValueError, match="one"):
        raise clear_tracebacks(one)
