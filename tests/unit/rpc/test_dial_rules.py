"""Whom a peer dials for others."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.rpc.dial_rules import HEARD_BURST, HeardDials, may_dial, may_dial_heard

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


def test_peers_that_are_found_on_this_machine_leave_the_limits_as_they_are() -> None:
    dials = HeardDials({LOOPBACK})
    for _ in range(2000):
        dials.found(LOOPBACK)
    hosts = [f"8.8.{number // 250}.{number % 250}" for number in range(HEARD_BURST + 1)]
    refusals = [dials.refusal(host, 31337, "", 0.0) for host in hosts]
    assert [bool(refusal) for refusal in refusals] == [False] * HEARD_BURST + [True]
