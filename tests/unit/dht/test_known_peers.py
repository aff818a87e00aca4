"""The peers that were seen before: who is kept, and what is believed of a file."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.errors import ConfigError
from manyhands.dht.known_peers import MAX_AGE_S, MAX_PEERS, VERSION, KnownPeers
from manyhands.dht.routing import Contact
from tests.network import identity_of

NOW = 1_800_000_000.0


def contact(number: int, *addresses: str) -> Contact:
    return Contact(identity_of(number).peer_id, list(addresses) or [f"/ip4/203.0.113.7/tcp/{number + 1}"])


def test_peers_heard_of_last_come_first_and_push_out_the_oldest() -> None:
    known = KnownPeers()
    known.heard_of([contact(number) for number in range(3)], NOW)
    known.heard_of([contact(2, "/ip4/203.0.113.8/tcp/1"), contact(3)], NOW + 1)
    assert known.latest_first() == [contact(2, "/ip4/203.0.113.8/tcp/1"), contact(3), contact(0), contact(1)]
    known.heard_of([contact(number) for number in range(10, 10 + MAX_PEERS - 1)], NOW + 2)
    assert len(known) == MAX_PEERS
    assert known.latest_first()[-1].peer_id == contact(2).peer_id


def test_known_peers_are_read_as_they_were_written() -> None:
    known = KnownPeers()
    known.heard_of([contact(1), contact(2, "/dns4/peer.example/tcp/5", "/ip6/2001:db8::1/tcp/5")], NOW)
    assert KnownPeers.from_json(known.to_json(), NOW + 5).latest_first() == known.latest_first()
    assert b'"seen_at"' in known.to_json(), "for people who look into it"


def test_entries_that_are_too_old_are_dropped() -> None:
    known = KnownPeers()
    known.heard_of([contact(1)], NOW)
    known.heard_of([contact(2)], NOW + 10)
    assert KnownPeers.from_json(known.to_json(), NOW + MAX_AGE_S).latest_first() == [contact(2)]
    assert len(KnownPeers.from_json(known.to_json(), 0.0)) == 2, "a clock that is not set yet loses nobody"


def file_of(*peers: tuple[str, list[str]], version: int = VERSION) -> bytes:
    entries = [{"peer_id": peer_id, "addresses": addresses, "seen_at": NOW} for peer_id, addresses in peers]
    return msgspec.json.encode({"version": version, "peers": entries})


def test_only_addresses_that_could_be_dialled_are_taken() -> None:
    own, other = identity_of(1).peer_id, identity_of(2).peer_id
    good = ["/ip4/203.0.113.7/tcp/4001", f"/ip4/203.0.113.8/tcp/4001/p2p/{own}"]
    bad = [
        "/ip4/203.0.113.7/udp/4001/quic",
        "/ip4/0.0.0.0/tcp/4001",
        "/ip4/203.0.113.7/tcp/0",
        f"/ip4/203.0.113.7/tcp/4001/p2p/{other}",
        "\x1b[2J",
    ]
    known = KnownPeers.from_json(file_of((own, [*bad, *good]), ("12D3KooWNobody", good[:1]), (other, bad[:3])), NOW)
    assert known.latest_first() == [Contact(own, good)]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"{}", "cannot be read: Object missing required field `version`"),
        (file_of(version=2), "it has version 2, and this program reads version 1"),
        (file_of(*[("x", ["y"])] * (MAX_PEERS + 1)), "length <= 64"),
        (file_of(("x", ["y"] * 9)), "length <= 8"),
        (file_of(("x", ["y" * 401])), "length <= 400"),
        (b'{"version": 1, "peers": [{"peer_id": "x", "addresses": [], "seen_at": "today"}]}', "cannot be read"),
    ],
)
def test_a_malformed_file_of_known_peers_is_refused_as_a_whole(raw: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KnownPeers.from_json(raw, NOW)


@given(st.binary(max_size=200), st.integers(0, 300), st.integers(0, 300))
def test_a_damaged_file_is_read_or_refused(noise: bytes, start: int, length: int) -> None:
    raw = file_of((identity_of(1).peer_id, ["/ip4/203.0.113.7/tcp/4001"]))
    try:
        known = KnownPeers.from_json(raw[:start] + noise + raw[start + length :], NOW)
    except ConfigError:
        return
    assert len(known) <= MAX_PEERS
