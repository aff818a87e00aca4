"""Whom a peer dials for others, and how often."""

from __future__ import annotations

import ipaddress
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.reach.rules import Allowance, Rate, may_dial

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
def test_nobody_has_a_peer_dial_what_is_nearer_to_it_than_they_are(target: str, caller: str, allowed: bool) -> None:
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


def test_what_is_refused_counts_nothing_and_the_wait_is_right() -> None:
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
