"""Tickets: all that a newcomer needs to join a run in one word, ``mh1...``, to copy, send or show as a QR code.

A ticket contains the name of the run, addresses of some of its peers, a digest of the run's settings, and a digest of
its charter if it has one. It is not secret and gives no access, unless it contains an invitation, which can be
exchanged for a lease of the run. ``mh`` is followed by the version of the format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import base58
import msgspec

from manyhands.base.address import Address, parse_addresses
from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId
from manyhands.base.run_id import checked_run_id

PREFIX = "mh1"
MAX_ADDRESSES = 4
DIGEST_BYTES = 16
CHARTER_BYTES = 32
MAX_LENGTH = 1000
_WORD = re.compile(r"mh(\d)[0-9A-Za-z]*")
_EXAMPLE = "copy it whole, from mh1 to its end"


class _Content(msgspec.Struct, array_like=True):
    run_id: str
    digest: bytes
    addresses: list[tuple[str, bytes]]  # multiaddr without the peer id, and the peer id as bytes


class _ChartedContent(_Content, array_like=True):
    charter: Annotated[bytes, msgspec.Meta(max_length=CHARTER_BYTES)] = b""
    token: bytes = b""


@dataclass(frozen=True)
class Ticket:
    """The data that a newcomer needs to join a run.

    Attributes:
        run_id: its name; empty for any run.
        addresses: addresses of some of its peers; at most :data:`MAX_ADDRESSES` are kept.
        digest: the first :data:`DIGEST_BYTES` of the fingerprint of the run manifest; empty if unknown.
        charter: digest of the charter of the run; empty if it has none.
        token: an invitation; may be empty. See :mod:`manyhands.access`.
    """

    run_id: str
    addresses: Sequence[Address]
    digest: bytes = b""
    charter: bytes = b""
    token: bytes = b""

    def __str__(self) -> str:
        places = [
            (str(Address(a.protocol, a.host, a.port)), base58.b58decode(a.peer_id) if a.peer_id else b"")
            for a in self.addresses[:MAX_ADDRESSES]
        ]
        while True:
            content = msgspec.msgpack.encode(self._content(places))
            word = PREFIX + base58.b58encode_check(content).decode()
            if len(word) <= MAX_LENGTH or len(places) <= 1:
                return word
            places.pop()

    def _content(self, places: list[tuple[str, bytes]]) -> _Content:
        digest = self.digest[:DIGEST_BYTES]
        if not self.charter:
            return _Content(self.run_id, digest, places)
        return _ChartedContent(self.run_id, digest, places, self.charter, self.token)

    @classmethod
    def is_one(cls, text: str) -> bool:
        """Whether a text looks like a ticket rather than an address; spaces and line breaks in it are ignored."""
        return _WORD.fullmatch("".join(text.split())) is not None

    @classmethod
    def parse(cls, text: str) -> Ticket:
        """Read a ticket; spaces and line breaks in it, as chat programs add them, are ignored.

        Raises:
            ConfigError: it was cut off or mistyped, or is of another version.
        """
        text = "".join(text.split())
        shown = text if len(text) <= 20 else f"{text[:16]}…"
        match = _WORD.fullmatch(text)
        if match is None or len(text) > MAX_LENGTH:
            raise ConfigError(f"{shown!r} is not a ticket; a ticket is one word that begins with {PREFIX}")
        if not text.startswith(PREFIX):
            raise ConfigError(
                f"ticket {shown} is of version {match[1]}, and this manyhands reads version 1; install a newer one: "
                "pip install --upgrade manyhands"
            )
        try:
            content = msgspec.msgpack.decode(base58.b58decode_check(text.removeprefix(PREFIX)), type=_ChartedContent)
        except (ValueError, msgspec.DecodeError) as error:
            raise ConfigError(f"ticket {shown} is cut off or mistyped; {_EXAMPLE}") from error
        if not content.addresses:
            raise ConfigError(f"ticket {shown} has no address in it; ask for another one")
        run_id = checked_run_id(content.run_id) if content.run_id else ""
        addresses = [
            Address.parse(place + (f"/p2p/{PeerId(base58.b58encode(peer).decode())}" if peer else ""))
            for place, peer in content.addresses[:MAX_ADDRESSES]
        ]
        return cls(run_id, addresses, content.digest, content.charter, content.token)

    @property
    def is_charted(self) -> bool:
        """Whether the run has a charter."""
        return bool(self.run_id and self.charter)


def split_tickets(places: Sequence[str | Address]) -> tuple[list[Address], list[Ticket]]:
    """Split initial peers as users give them into addresses, including those in tickets, and tickets.

    Raises:
        ConfigError: one is neither a ticket nor an address.
    """
    if isinstance(places, str) or not isinstance(places, Iterable):
        return parse_addresses(places), []  # raises an error that says what to write
    tickets = [Ticket.parse(place) for place in places if isinstance(place, str) and Ticket.is_one(place)]
    others = [place for place in places if not (isinstance(place, str) and Ticket.is_one(place))]
    return [*(address for ticket in tickets for address in ticket.addresses), *parse_addresses(others)], tickets
