from __future__ import annotations

import re

import base58
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError
from manyhands.base.ticket import DIGEST_BYTES, MAX_ADDRESSES, Ticket
from tests.network import identity_of

PEERS = [identity_of(number).peer_id for number in (1, 2)]
ADDRESSES = [
    Address.parse(f"/ip4/203.0.113.7/tcp/31337/p2p/{PEERS[0]}"),
    Address.parse(f"/dns4/x.example/tcp/1/p2p/{PEERS[1]}"),
    Address.parse("203.0.113.8:31337"),
]
RUN_IDS = st.text(st.characters(categories=["L", "N"]), max_size=64)


@given(RUN_IDS, st.lists(st.sampled_from(ADDRESSES), min_size=1, max_size=MAX_ADDRESSES), st.binary(max_size=40))
def test_a_ticket_is_one_word_with_run_addresses_and_digest(
    run_id: str, addresses: list[Address], digest: bytes
) -> None:
    ticket = Ticket(run_id, addresses, digest)
    text = str(ticket)
    assert re.fullmatch("mh1[0-9A-Za-z]+", text)
    assert Ticket.is_one(text)
    assert Ticket.parse(f" {text}\n") == Ticket(run_id, addresses, digest[:DIGEST_BYTES])
    broken = f"{text[:9]}\n  {text[9:]}"
    assert Ticket.is_one(broken), "as chat programs break it"
    assert Ticket.parse(broken) == Ticket.parse(text)


@pytest.mark.parametrize("address", ["203.0.113.7:31337", str(ADDRESSES[0]), "mh1.example:31337"])
def test_an_address_is_no_ticket(address: str) -> None:
    assert not Ticket.is_one(address)


WORD = str(Ticket("run", ADDRESSES, b"digest"))


@given(st.integers(0, len(WORD) - 1))
def test_a_ticket_that_is_cut_or_mistyped_is_refused(position: int) -> None:
    mistyped = WORD[:position] + ("x" if WORD[position] != "x" else "y") + WORD[position + 1 :]
    for text in (WORD[:position], mistyped):
        with pytest.raises(ConfigError):
            Ticket.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WORD[:-5], "is cut off or mistyped; copy it whole"),
        ("mh1", "is cut off or mistyped"),
        ("mh2" + WORD[3:], "is of version 2, and this manyhands reads version 1"),
        ("hello", "'hello' is not a ticket"),
        ("mh1" + "x" * 2000, "is not a ticket"),
        (str(Ticket("run", [])), "has no address in it"),
        ("mh1" + base58.b58encode_check(msgspec.msgpack.encode(["a.b", b"", [("/ip4/1.2.3.4/tcp/1", b"")]])).decode(),
         "run_id 'a.b' has a '.'"),
        ("mh1" + base58.b58encode_check(msgspec.msgpack.encode(["r", b"", [("nonsense", b"")]])).decode(),
         "cannot read address"),
        ("mh1" + base58.b58encode_check(msgspec.msgpack.encode(["r", b"", [("/ip4/1.2.3.4/tcp/1", b"x")]])).decode(),
         "peer id"),
    ],
)  # fmt: skip
def test_tickets_that_cannot_be_used_are_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Ticket.parse(text)


def test_a_ticket_is_never_too_long_to_be_read() -> None:
    long = [Address.parse(f"/dns4/{'.'.join(['a' * 60] * 4)}{n}/tcp/1/p2p/{PEERS[0]}") for n in range(4)]
    ticket = Ticket.parse(str(Ticket("run", long)))
    assert 1 <= len(ticket.addresses) < 4
