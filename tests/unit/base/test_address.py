"""Addresses: what is read, what is written, and what is said of the rest."""

import ipaddress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from manyhands.base.address import Address, host_ports, parse_addresses, parse_listen_addresses
from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId, peer_id_from_public_key

PEER_ID = PeerId("12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq")

EXAMPLES = [
    ("/ip4/203.0.113.7/tcp/31337", Address("ip4", "203.0.113.7", 31337)),
    (f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER_ID}", Address("ip4", "203.0.113.7", 31337, PEER_ID)),
    ("/ip4/0.0.0.0/tcp/0", Address("ip4", "0.0.0.0", 0)),
    ("/ip6/::1/tcp/80", Address("ip6", "::1", 80)),
    (f"/dns4/x.tcp.ngrok.io/tcp/12345/p2p/{PEER_ID}", Address("dns4", "x.tcp.ngrok.io", 12345, PEER_ID)),
    ("/dns6/example.com/tcp/1", Address("dns6", "example.com", 1)),
    ("/dns/my_host/tcp/65535", Address("dns", "my_host", 65535)),
]


@pytest.mark.parametrize(("text", "address"), EXAMPLES)
def test_multiaddrs_are_read_and_written(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "multiaddr"),
    [
        ("203.0.113.7:31337", "/ip4/203.0.113.7/tcp/31337"),
        ("[::1]:80", "/ip6/::1/tcp/80"),
        ("[0:0:0:0:0:0:0:1]:80", "/ip6/::1/tcp/80"),
        ("[2001:DB8::1]:80", "/ip6/2001:db8::1/tcp/80"),
        ("[fe80::1%eth0]:80", "/ip6/fe80::1%eth0/tcp/80"),
        ("localhost:80", "/dns/localhost/tcp/80"),
        ("0.tcp.ngrok.io:12345", "/dns/0.tcp.ngrok.io/tcp/12345"),
        ("3com.com.:80", "/dns/3com.com./tcp/80"),
        ("/ip6/0:0:0:0:0:0:0:1/tcp/80/", "/ip6/::1/tcp/80"),
    ],
)
def test_other_spellings_of_addresses_are_read(text: str, multiaddr: str) -> None:
    assert str(Address.parse(text)) == multiaddr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "",
            "an address is empty: a variable of the shell is probably unset; write it like /ip4/203.0.113.7/",
        ),
        (" ", "an address is empty"),
        ("/", "cannot read address '/'"),
        ("localhost", "cannot read address 'localhost'"),
        (":80", "address ':80' has no host; to be dialled it needs one, such as 203.0.113.7:80"),
        ("80", "address '80' has no host"),
        ("*:80", "address '*:80' has no host"),
        ("host:*", "'*' is not a port"),
        ("[]:80", "cannot read address '[]:80'"),
        ("host:", "'' is not a port; a port is a number from 1 to 65535"),
        ("host:http", "'http' is not a port"),
        ("host:-1", "'-1' is not a port"),
        ("host:65536", "'65536' is not a port"),
        ("host:\uff18\uff10", "is not a port"),  # digits to str.isdigit()
        ("host:" + "9" * 5000, "is not a port"),  # more digits than int() takes
        ("::1:80", "write an IPv6 address in brackets: [::1]:31337"),
        ("my host:80", "'my host' is not a host name"),
        ("-host:80", "'-host' is not a host name"),
        ("a..b:80", "'a..b' is not a host name"),
        ("a" * 64 + ":80", "is not a host name"),
        ("a." * 127 + ":80", "is not a host name"),
        ("127.0.0.1:1,127.0.0.1:2", "contains several addresses; give a list with one text for each"),
        ("127.0.0.1:1 127.0.0.1:2", "contains several addresses"),
        ("http://host:80", "'http://host:80' is a URL, not an address; write it without http://, like host:80"),
        ("https://me@host:80/path", "write it without https://, like host:80"),
        ("tcp://[::1]:80", "write it without tcp://, like [::1]:80"),
        ("http://host", "write it without http://, like HOST:PORT"),
        ("10.0.0.256:80", "'10.0.0.256' is not an IPv4 address"),
        ("127.1:80", "'127.1' is not an IPv4 address"),
        ("/dns4/127.1/tcp/80", "'127.1' is not an IPv4 address"),
        ("/ip4/203.0.113.7", "cannot read address"),
        ("/ip4/203.0.113.7/udp/31337", "cannot read address"),
        ("/ip4/203.0.113.7/udp/31337/quic-v1", "cannot read address"),
        ("/ip4/203.0.113.7/tcp/31337/ws", "cannot read address"),
        ("/ip4/203.0.113.7/tcp/31337/p2p", "cannot read address"),
        ("/ip4/203.0.113.7/tcp/31337/p2p/", "cannot read address"),
        ("/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW", "'12D3KooW' is not a peer id"),
        (f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER_ID} ", "is not a peer id"),
        (f"/ip4/203.0.113.7/tcp/31337/ipfs/{PEER_ID}", "cannot read address"),
        (f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER_ID}/p2p-circuit", "cannot read address"),
        ("/ip4/::1/tcp/80", "'::1' is not an IPv4 address"),
        ("/ip4/203.0.113.007/tcp/80", "'203.0.113.007' is not an IPv4 address"),
        ("/ip6/203.0.113.7/tcp/80", "'203.0.113.7' is not an IPv6 address"),
        ("/ip6/fe80::1%" + "e" * 16 + "/tcp/80", "is not an IPv6 address"),
        ("[fe80::1%e\n0]:80", "is not a host name"),
        ("/dns4//tcp/80", "'' is not a host name"),
        ("/unix/socket/tcp/80", "begins with /unix; /ip4, /ip6, /dns, /dns4 and /dns6 are understood"),
        ("/ip4/203.0.113.7/tcp/x", "'x' is not a port"),
    ],
)
def test_bad_input_is_named_with_its_rule(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse(text)
    assert said in str(caught.value)


BOTH_FAMILIES = "/ip6/::/tcp/1337"


@pytest.mark.parametrize(
    ("text", "multiaddr"),
    [
        ("1337", BOTH_FAMILIES),
        (":1337", BOTH_FAMILIES),
        ("*:1337", BOTH_FAMILIES),
        ("[::]:1337", BOTH_FAMILIES),
        ("[::]:*", "/ip6/::/tcp/0"),
        (":*", "/ip6/::/tcp/0"),
        ("*:*", "/ip6/::/tcp/0"),
        ("127.0.0.1:*", "/ip4/127.0.0.1/tcp/0"),
        ("/ip6/::/tcp/*", "/ip6/::/tcp/0"),
        ("/ip4/0.0.0.0/tcp/1337", "/ip4/0.0.0.0/tcp/1337"),
        ("localhost:1337", "/dns/localhost/tcp/1337"),
    ],
)
def test_where_to_listen_may_be_said_in_short(text: str, multiaddr: str) -> None:
    assert str(Address.parse_listen(text)) == multiaddr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "an address is empty: a variable of the shell is probably unset; write it like /ip4/0.0.0.0/tcp/31337"),
        ("localhost", "cannot read address 'localhost'; write it like /ip4/0.0.0.0/tcp/31337, 0.0.0.0:31337 or 31337"),
        ("*", "cannot read address '*'"),
        (":http", "'http' is not a port"),
        (":", "'' is not a port"),
        ("65536", "in address '65536', '65536' is not a port"),
        ("http://0.0.0.0:1337", "is a URL, not an address; write it without http://, like 0.0.0.0:1337"),
        ("::1:80", "write an IPv6 address in brackets"),
    ],
)
def test_listen_addresses_that_cannot_be_read_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse_listen(text)
    assert said in str(caught.value)


def test_all_interfaces_of_both_families_have_those_of_one_in_them() -> None:
    both, other_port = "/ip6/::/tcp/1337", "/ip4/0.0.0.0/tcp/1338"
    addresses = parse_listen_addresses(["/ip4/0.0.0.0/tcp/1337", "1337", other_port])
    assert [str(address) for address in addresses] == [both, other_port]


LABELS = st.from_regex(r"[a-z]([a-z0-9_-]{0,20}[a-z0-9_])?", fullmatch=True)
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join)
PORTS = st.integers(0, 65535)
PEER_IDS = st.none() | st.binary(min_size=32, max_size=32).map(peer_id_from_public_key)
ADDRESSES = (
    st.builds(Address, st.just("ip4"), st.ip_addresses(v=4).map(str), PORTS, PEER_IDS)
    | st.builds(Address, st.just("ip6"), st.ip_addresses(v=6).map(str), PORTS, PEER_IDS)
    | st.builds(Address, st.sampled_from(["dns", "dns4", "dns6"]), NAMES, PORTS, PEER_IDS)
)


@given(ADDRESSES)
def test_parse_reads_what_str_writes(address: Address) -> None:
    assert Address.parse(str(address)) == address


@given(st.ip_addresses(v=6) | st.ip_addresses(v=4), PORTS, st.booleans())
def test_one_ip_and_port_is_one_address_in_any_spelling(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int, long: bool
) -> None:
    address = Address.of(ip.exploded if long else str(ip), port)
    assert address == Address.of(str(ip), port) == Address.parse(str(address))


FRAGMENTS = st.sampled_from(
    [
        "/",
        "ip4",
        "ip6",
        "dns",
        "tcp",
        "p2p",
        ":",
        "[",
        "]",
        "%",
        "*",
        "://",
        ".",
        "-",
        "::1",
        "1.2.3.4",
        "80",
        "a",
        PEER_ID,
    ]
)


@given(st.text() | st.lists(FRAGMENTS | st.text(max_size=3), max_size=14).map("".join))
@example("/ip4/1.2.3.4/tcp/" + "9" * 5000)
def test_no_text_raises_anything_but_a_config_error(text: str) -> None:
    for parse in (Address.parse, Address.parse_listen):
        try:
            address = parse(text)
        except ConfigError:
            continue
        assert Address.parse(str(address)) == address


def test_of_refuses_what_is_neither_ip_nor_name() -> None:
    with pytest.raises(ConfigError, match="'a b' is not a host name"):
        Address.of("a b", 80)


def test_with_peer_adds_the_peer_id_to_a_copy() -> None:
    bare = Address.parse("/dns4/x.tcp.ngrok.io/tcp/12345")
    assert bare.with_peer(PEER_ID) == Address.parse(f"/dns4/x.tcp.ngrok.io/tcp/12345/p2p/{PEER_ID}")
    assert bare.peer_id is None


@pytest.mark.parametrize(
    ("text", "is_unspecified", "is_loopback"),
    [
        ("0.0.0.0:80", True, False),
        ("[::]:80", True, False),
        ("127.0.0.2:80", False, True),
        ("[::1]:80", False, True),
        ("10.0.0.1:80", False, False),
        ("localhost:80", False, False),  # a name is whatever it resolves to
    ],
)
def test_unspecified_and_loopback_addresses_are_told_apart(text: str, is_unspecified: bool, is_loopback: bool) -> None:
    address = Address.parse(text)
    assert (address.is_unspecified, address.is_loopback) == (is_unspecified, is_loopback)


def test_parse_addresses_takes_both_forms() -> None:
    address = Address.parse("localhost:80")
    assert parse_addresses(["localhost:80", address]) == [address, address]
    assert parse_addresses([]) == []


def test_ipv6_is_shown_in_commands_only_if_there_is_nothing_else_and_with_quotes() -> None:
    """The shell of macOS takes its brackets for a pattern, finds no file, and runs nothing."""
    ip4, ip6 = "/ip4/203.0.113.7/tcp/31337", "/ip6/2a01:4f8::2/tcp/31337"
    assert host_ports([ip4, ip6, "localhost:31338"]) == ["203.0.113.7:31337", "localhost:31338"]
    assert host_ports([ip6]) == ["'[2a01:4f8::2]:31337'"]
