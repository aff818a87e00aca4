"""Which addresses are told, and which are believed."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.address import MAX_ADDRESSES, Address
from manyhands.base.errors import ConfigError
from manyhands.rpc.announce import check_announced, dialable_addresses, own_hosts, seen_from_outside
from manyhands.rpc.dial_rules import may_dial_heard
from manyhands.transport import tcp
from tests.network import identity_of

PEER = identity_of(1).peer_id
ROUTER, HOME, LOOP = "/ip4/203.0.113.7/tcp/31337", "/ip4/192.168.0.2/tcp/31337", "/ip4/127.0.0.1/tcp/31337"


def seen(announced: list[str], remote_host: str) -> list[str]:
    return [str(address).removesuffix(f"/p2p/{PEER}") for address in seen_from_outside(PEER, announced, remote_host)]


def test_all_interfaces_become_addresses_that_can_be_dialled() -> None:
    announced = dialable_addresses([Address.parse("/ip4/0.0.0.0/tcp/31337")])
    assert Address.parse(LOOP) in announced
    assert all(address.port == 31337 and not address.is_unspecified for address in announced)


def announced_with(
    interfaces: dict[str, list[str]], down: set[str], bridges: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The hosts that are announced by a machine with these interfaces, besides that of the default route."""

    def listed(host: str) -> SimpleNamespace:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return SimpleNamespace(family=family, address=host)

    stats = {name: SimpleNamespace(isup=name not in down) for name in interfaces}
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: {name: [listed(host) for host in hosts] for name, hosts in interfaces.items()}
    )
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr("manyhands.rpc.announce.INTERFACES", bridges)
    monkeypatch.setattr(tcp, "PROBES", {  # nothing leads there
        socket.AF_INET: "255.255.255.255", socket.AF_INET6: "2001:db8::1%nowhere",
    })  # fmt: skip
    bound = [Address.parse("/ip6/::/tcp/31337"), Address.parse("/ip4/0.0.0.0/tcp/31337")]
    return [address.host for address in dialable_addresses(bound)]


def test_each_network_of_this_machine_has_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker0" / "bridge").mkdir(parents=True)
    interfaces = {
        "lo": ["127.0.0.1", "::1"],
        "eth0": ["192.168.0.2", "2a01:4f8::2", "2a01:4f8::dead:beef", "fe80::1%eth0"],
        "docker0": ["172.17.0.1"],
        "wg0": ["10.8.0.2"],
        "eth1": ["192.168.9.2"],
        "eth2": ["169.254.1.1"],
        "eth3": ["fd00::2", "fe80::2%eth3"],
    }
    hosts = announced_with(interfaces, {"eth1"}, tmp_path, monkeypatch)
    assert hosts == ["2a01:4f8::2", "192.168.0.2", "10.8.0.2", "127.0.0.1"]


@pytest.mark.parametrize(
    ("eth0", "announced"),
    [
        (["192.168.0.2", "fd00::2"], ["192.168.0.2", "127.0.0.1"]),
        (["2a01:4f8::2"], ["2a01:4f8::2", "127.0.0.1"]),
        (["fd00::2"], ["fd00::2", "127.0.0.1"]),
        (["fe80::1%eth0"], ["127.0.0.1"]),
    ],
)
def test_a_local_ipv6_address_is_announced_if_there_is_no_other(
    eth0: list[str], announced: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert announced_with({"lo": ["127.0.0.1", "::1"], "eth0": eth0}, set(), tmp_path, monkeypatch) == announced


def test_a_client_knows_its_own_hosts_of_both_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody can make it dial services of its own machine at its global IPv6 address."""
    announced_with({"lo": ["127.0.0.1", "::1"], "eth0": ["192.168.0.2", "2a01:4f8::2"]}, set(), tmp_path, monkeypatch)
    assert own_hosts([]) == {"192.168.0.2", "2a01:4f8::2"}
    assert not may_dial_heard("2a01:4f8::2", 22, own_hosts([]))


@pytest.mark.parametrize("host", ["::1", "fd00::2"])
def test_an_ipv6_address_that_the_user_has_named_is_announced(host: str) -> None:
    bound = [Address.parse(LOOP), Address.parse(HOME), Address.of(host, 31337)]
    assert Address.of(host, 31337) in dialable_addresses(bound)


def test_the_address_of_one_interface_is_given_once_and_unchanged() -> None:
    assert dialable_addresses([Address.parse(HOME), Address.parse(HOME)]) == [Address.parse(HOME)]


def test_a_peer_behind_a_router_is_also_dialled_where_it_came_from() -> None:
    assert seen([HOME, LOOP], "203.0.113.7") == [ROUTER, HOME]


def test_on_the_same_machine_loopback_counts() -> None:
    assert seen([HOME, LOOP], "127.0.0.1") == [LOOP, HOME]


@pytest.mark.parametrize("public", ["/ip4/8.8.4.4/tcp/443", "/dns4/x.tcp.ngrok.io/tcp/12345"])
@pytest.mark.parametrize("seen_at", ["127.0.0.1", "192.168.0.2", "1.1.1.1"])
def test_a_peer_that_announces_a_public_address_gets_no_guessed_one(public: str, seen_at: str) -> None:
    assert seen([public], seen_at) == [public]
    assert seen(["/ip4/192.168.0.9/tcp/443", public], seen_at) == ["/ip4/192.168.0.9/tcp/443", public]


def test_a_peer_with_a_public_ipv6_address_gets_a_guessed_one_for_ipv4() -> None:
    """Its router for IPv4 may forward the port, and many peers have no IPv6."""
    ip6 = "/ip6/2a01:4f8::2/tcp/31337"
    assert seen([HOME, ip6, LOOP], "203.0.113.7") == [ROUTER, HOME, ip6]
    assert seen([HOME, ip6, LOOP], "2a01:4f8::dead:beef") == [HOME, ip6], "seen at a temporary address"


def test_a_peer_that_is_seen_over_ipv6_and_announces_none_is_not_dialled_there() -> None:
    assert seen([HOME, LOOP], "2a01:4f8::2") == [HOME]


@pytest.mark.parametrize("bad", ["/ip4/0.0.0.0/tcp/31337", "/ip6/::/tcp/31337", "/ip4/203.0.113.7/tcp/0"])
def test_announced_addresses_that_nobody_could_dial_are_refused(bad: str) -> None:
    check_announced([Address.parse(ROUTER), Address.parse(LOOP)])
    with pytest.raises(ConfigError, match=r"other peers cannot dial .*; give .* such as /ip4/203.0.113.7/tcp/31337"):
        check_announced([Address.parse(ROUTER), Address.parse(bad)])


def test_a_client_has_no_address() -> None:
    assert seen([], "203.0.113.7") == []


def test_a_name_is_kept_and_says_nothing_of_ports_elsewhere() -> None:
    assert seen(["/dns4/x.tcp.ngrok.io/tcp/12345"], "203.0.113.7") == ["/dns4/x.tcp.ngrok.io/tcp/12345"]


def test_announced_addresses_that_cannot_be_read_are_skipped() -> None:
    assert seen(["/quic/203.0.113.7", "", HOME, "\x00"], "") == [HOME]


def test_an_announced_address_with_another_peer_id_gets_that_of_its_peer() -> None:
    (address,) = seen_from_outside(PEER, [f"{HOME}/p2p/{identity_of(2).peer_id}"], "")
    assert address.peer_id == PEER


def test_announced_addresses_are_limited_in_number() -> None:
    assert len(seen([f"/ip4/198.51.100.1/tcp/{port}" for port in range(1, 100)], "")) == MAX_ADDRESSES


@given(st.lists(st.text(max_size=60), max_size=10), st.sampled_from(["", "127.0.0.1", "203.0.113.7", "2001:db8::1"]))
def test_any_text_gives_addresses_of_this_peer_or_none(announced: list[str], remote_host: str) -> None:
    for address in seen_from_outside(PEER, announced, remote_host):
        assert address.peer_id == PEER


@pytest.mark.parametrize("host", ["::1", "fe80::1%eth0", "fd00::3"])
def test_a_peer_seen_over_ipv6_gets_an_address_with_that_host(host: str) -> None:
    (address, *_) = seen_from_outside(PEER, ["/ip6/fd00::2/tcp/1"], host)
    assert ipaddress.ip_address(address.host) == ipaddress.ip_address(host)
