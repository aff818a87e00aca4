"""Limits on who may connect."""

from __future__ import annotations

import pytest

from manyhands.base.errors import ConfigError
from manyhands.base.rate import BURST_S
from manyhands.transport.admission import Admission, ListenLimits
from tests.traced import traced_memory

LIMITS = ListenLimits(max_handshakes=5, max_handshakes_per_host=3, max_streams_per_host=4)
ONE, OTHER = "192.0.2.1", "192.0.2.2"


def test_one_host_cannot_take_all_handshakes() -> None:
    admission = Admission(LIMITS)
    assert [admission.admit(ONE) for _ in range(4)] == [True, True, True, False]
    assert admission.admit(OTHER)
    assert not admission.is_full
    assert admission.admit(OTHER)
    assert admission.is_full
    admission.left(ONE, in_handshake=True)
    assert not admission.is_full
    assert admission.admit(ONE)


def test_one_host_cannot_take_all_streams() -> None:
    admission = Admission(LIMITS)
    for _ in range(4):
        assert admission.admit(ONE)
        admission.shaken_hands(ONE)
    assert not admission.admit(ONE)
    assert admission.admit(OTHER)
    admission.left(ONE, in_handshake=False)
    assert admission.admit(ONE)


def test_one_host_begins_so_many_handshakes_a_second() -> None:
    admission = Admission(ListenLimits(max_handshakes_per_s=10))
    assert sum(admission.is_within_rate(ONE, 7.0) for _ in range(1000)) == 10 * BURST_S
    assert sum(admission.is_within_rate(ONE, 9.0) for _ in range(1000)) == 20
    assert admission.is_within_rate(OTHER, 9.0)
    for number in range(int(10 * BURST_S)):
        assert admission.is_within_rate(f"2001:db8::{number}", 9.0)
    assert not admission.is_within_rate("2001:db8::ffff", 9.0)
    assert admission.is_within_rate("2001:db8:0:1::1", 9.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_peers_of_this_machine_shake_hands_as_often_as_they_like(host: str) -> None:
    admission = Admission(ListenLimits(max_handshakes_per_s=1))
    assert all(admission.is_within_rate(host, 0.0) for _ in range(100))


def test_all_addresses_of_one_customer_are_one_host() -> None:
    admission = Admission(LIMITS)
    assert [admission.admit(f"2001:db8::{number}") for number in range(4)] == [True, True, True, False]
    assert admission.admit("2001:db8:0:1::1")
    assert [admission.admit(host) for host in (ONE, f"::ffff:{ONE}", f"::ffff:{ONE}", ONE)] == [True, True, True, False]


def test_streams_are_limited_in_all() -> None:
    admission = Admission(ListenLimits(max_streams=3))
    for number in range(3):
        assert not admission.is_full
        assert admission.admit(f"192.0.2.{number}")
        admission.shaken_hands(f"192.0.2.{number}")
    assert admission.is_full
    admission.left("192.0.2.1", in_handshake=False)
    assert not admission.is_full


def test_connections_leave_half_of_the_open_files_to_the_process() -> None:
    admission = Admission(ListenLimits(), max_files=64)
    assert sum(admission.admit(ONE) for _ in range(20)) == 16
    assert sum(admission.admit(OTHER) for _ in range(20)) == 16
    assert admission.is_full


def test_hosts_that_left_are_forgotten() -> None:
    admission = Admission(ListenLimits(max_streams=10))
    with traced_memory() as num_held:
        for number in range(1000):
            host = f"192.0.{number // 250}.{number % 250}"
            assert admission.admit(host)
            admission.shaken_hands(host)
            admission.left(host, in_handshake=False)
        assert num_held() < 20_000, "of a thousand names and counts"
    assert not admission.is_full


def test_connection_limits_of_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_handshakes=0: at least 1 is needed"):
        ListenLimits(max_handshakes=0)
