"""Whom a peer dials for others, and how often."""

from __future__ import annotations

import ipaddress
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.rpc.dial_rules import Allowance, Rate, may_dial, may_dial_heard

LOOPBACK, LAN, CGNAT, PUBLIC, OTHER = "127.0.0.1", "192.168.1.7", "100.64.0.3", "8.8.8.8", "1.1.1.1"
IPS = st.ip_addresses().map(str)


@pytest.mark.parametrize(
    ("target", "caller", "allowed"),
    [
        (PUBLIC, PUBLIC, True),
        (OTHER, PUBLIC, True),  # a tunnel has an address of its own
        (LAN, PUBLIC, False),
        (CGNAT, PUBLIC, False),
        (LOOPBACK, PUBLIC, False),
        ("127.8.8.8", PUBLIC, False),
        ("::1", PUBLIC, False),
        ("::ffff:127.0.0.1", PUBLIC, False),
        ("::ffff:192.168.1.7", PUBLIC, False),
        ("fd00::1", PUBLIC, False),
        ("2001:4860:4860::8888", PUBLIC, True),
        ("10.0.0.9", LAN, True),
        (PUBLIC, LAN, True),
        (LOOPBACK, LAN, False),
        (LOOPBACK, LOOPBACK, True),
        (LAN, LOOPBACK, True),
        ("169.254.169.254", LAN, False),
        ("169.254.169.254", LOOPBACK, False),
        ("169.254.7.7", "169.254.7.7", True),
        ("fe80::1%eth0", "fe80::1%eth0", True),
        ("fe80::1", LAN, False),
        ("0.0.0.0", LOOPBACK, False),
        ("224.0.0.1", LOOPBACK, False),
        ("255.255.255.255", LOOPBACK, False),
        ("ff02::1", LOOPBACK, False),
        ("64:ff9b::a00:1", PUBLIC, False),  # 10.0.0.1 behind a translator
        (PUBLIC, "::ffff:8.8.8.8", True),
    ],
)
def test_a_caller_cannot_have_a_peer_dial_addresses_that_are_more_local_than_its_own(
    target: str, caller: str, allowed: bool
) -> None:
    assert may_dial(target, caller) is allowed


@given(target=IPS, caller=IPS.filter(lambda text: ipaddress.ip_address(text).is_global))
def test_a_caller_from_the_internet_reaches_the_internet_only(target: str, caller: str) -> None:
    if may_dial(target, caller) and target != caller:
        assert ipaddress.ip_address(target).is_global


@given(
    takes=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 5.0)), max_size=60),
    burst=st.integers(1, 4),
    period_s=st.floats(0.5, 5.0),
)
def test_no_source_gets_more_than_its_rate(takes: list[tuple[str, float]], burst: int, period_s: float) -> None:
    allowance = Allowance(Rate(burst=burst, period_s=period_s), Rate(burst=6, period_s=1.0))
    taken: dict[str, list[float]] = {source: [] for source in "abc"}
    now = 0.0
    for source, pause_s in takes:
        now += pause_s
        if not allowance.take(source, now):
            taken[source].append(now)
    for times in taken.values():
        for start in range(len(times)):
            for end in range(start, len(times)):
                most = burst + math.floor((times[end] - times[start]) / period_s + 1e-6)
                assert end - start + 1 <= most


def test_a_refused_request_does_not_count_and_is_told_how_long_to_wait() -> None:
    allowance = Allowance(Rate(burst=2, period_s=10.0), Rate(burst=100, period_s=0.1))
    assert [allowance.take("a", 0.0), allowance.take("a", 0.0)] == [0.0, 0.0]
    assert [allowance.take("a", 1.0), allowance.take("a", 4.0)] == [9.0, 6.0]
    assert allowance.take("b", 4.0) == 0.0
    assert allowance.take("a", 10.0) == 0.0
    assert allowance.take("a", 10.0) == 10.0


def test_many_sources_are_bounded_together_and_forgotten() -> None:
    allowance = Allowance(Rate(burst=1, period_s=10.0), Rate(burst=3, period_s=1.0))
    allowed = [not allowance.take(str(number), 0.01 * number) for number in range(1000)]
    assert sum(allowed) == 3 + 9
    assert len(allowance) <= 12
    assert allowance.take("x", 1000.0) == 0.0
    assert len(allowance) == 1


@pytest.mark.parametrize(
    ("target", "port", "own_host", "sayer", "allowed"),
    [
        (PUBLIC, 22, OTHER, "", True),  # a peer may listen at any port of the internet
        (PUBLIC, 22, PUBLIC, "", False),
        (PUBLIC, 31337, PUBLIC, "", True),  # another peer of this machine
        (LAN, 31337, OTHER, "", False),
        (LAN, 31337, "192.168.9.1", "", True),
        (LAN, 31337, "10.0.0.1", "", False),
        (LAN, 80, "192.168.9.1", "", False),
        (LAN, 31337, OTHER, LAN, True),
        (LAN, 31337, OTHER, PUBLIC, False),
        (LOOPBACK, 31337, LOOPBACK, "", True),
        (LOOPBACK, 31337, LAN, "", False),
        ("::1", 31337, "::1", "", True),
        ("169.254.169.254", 80, "169.254.1.1", "", False),
        ("::ffff:169.254.169.254", 8080, LAN, "169.254.1.1", False),
        ("fe80::1", 31337, "fe80::2", "", False),
        ("203.0.113.7", 31337, "203.0.113.9", "", True),  # a network of a test, such as those of documentation
        ("203.0.113.7", 31337, "198.51.100.9", "", False),
    ],
)
def test_addresses_from_other_peers_are_dialled_on_the_internet_or_in_this_peers_network_only(
    target: str, port: int, own_host: str, sayer: str, allowed: bool
) -> None:
    assert may_dial_heard(target, port, [own_host], sayer) == allowed


def test_a_peer_that_does_not_know_yet_where_it_is_finds_those_it_knew() -> None:
    assert may_dial_heard(LOOPBACK, 31337, [])
    assert not may_dial_heard(LOOPBACK, 22, [])
    assert not may_dial_heard("169.254.169.254", 31337, [])


def test_allowance_that_was_given_back_may_be_taken_again() -> None:
    allowance = Allowance(Rate(burst=1, period_s=60.0), Rate(burst=1, period_s=60.0))
    for _ in range(3):
        assert not allowance.take("here", 5.0)
        allowance.give_back("here")
    assert not allowance.take("here", 5.0)
    assert allowance.take("here", 5.0)
