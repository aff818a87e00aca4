"""Limits on who may connect."""

from __future__ import annotations

import pytest

from manyhands.base.errors import ConfigError
from manyhands.transport.admission import Admission, ListenLimits

LIMITS = ListenLimits(max_handshakes=5, max_handshakes_per_host=3, max_streams_per_host=4)


def test_one_host_cannot_take_all_handshakes() -> None:
    admission = Admission(LIMITS)
    assert [admission.admit("a") for _ in range(4)] == [True, True, True, False]
    assert admission.admit("b")
    assert not admission.is_full
    assert admission.admit("b")
    assert admission.is_full
    admission.left("a", in_handshake=True)
    assert not admission.is_full
    assert admission.admit("a")


def test_one_host_cannot_take_all_streams() -> None:
    admission = Admission(LIMITS)
    for _ in range(4):
        assert admission.admit("a")
        admission.shaken_hands("a")
    assert not admission.admit("a")
    assert admission.admit("b")
    admission.left("a", in_handshake=False)
    assert admission.admit("a")


def test_nothing_is_remembered_of_who_left() -> None:
    admission = Admission(LIMITS)
    for number in range(1000):
        assert admission.admit(f"host {number}")
        admission.shaken_hands(f"host {number}")
        admission.left(f"host {number}", in_handshake=False)
    assert not admission._handshakes
    assert not admission._streams


def test_limits_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_handshakes=0: at least 1 is needed"):
        ListenLimits(max_handshakes=0)
