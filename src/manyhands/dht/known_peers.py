"""The peers that a node has seen, to come back by them when the initial peers are gone.

Rules:
    * of the peers that were in the routing table, those heard of last are kept, at most :data:`MAX_PEERS`;
    * who is lost stays, until so many others were heard of since: all of them may be back after an hour offline;
    * they can be written down and read again. What is read may come from strangers: each entry is checked, it is
      dialled with the peer id that it names, and entries older than :data:`MAX_AGE_S` are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Annotated

import msgspec

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId, public_key_of
from manyhands.dht.routing import MAX_ADDRESS_LENGTH, MAX_ADDRESSES, Contact

MAX_PEERS = 64
MAX_AGE_S = 30 * 86400.0
"""By then most addresses of volunteers belong to somebody else."""
VERSION = 1


class KnownPeer(msgspec.Struct, frozen=True):
    """A peer as it is written down.

    Attributes:
        addresses: multiaddrs, the best first.
        seen_at: when it was last heard of, in seconds since 1970 by the clock of who wrote this.
    """

    peer_id: Annotated[str, msgspec.Meta(max_length=64)]
    addresses: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_LENGTH)]], msgspec.Meta(max_length=MAX_ADDRESSES)
    ]
    seen_at: float


class _File(msgspec.Struct, frozen=True):
    version: int
    peers: Annotated[list[KnownPeer], msgspec.Meta(max_length=MAX_PEERS)]


class _Version(msgspec.Struct, frozen=True):
    version: int


class KnownPeers:
    """Peers by how lately they were heard of."""

    def __init__(self, peers: Iterable[KnownPeer] = ()) -> None:
        self._peers: dict[str, KnownPeer] = {peer.peer_id: peer for peer in peers}  # latest first

    def __len__(self) -> int:
        return len(self._peers)

    def latest_first(self) -> list[Contact]:
        """All of them, those heard of last first."""
        return [Contact(PeerId(peer.peer_id), peer.addresses) for peer in self._peers.values()]

    def heard_of(self, contacts: Iterable[Contact], wall_now: float) -> None:
        """Put contacts before all others, in their order; the last ones make room."""
        heard: dict[str, KnownPeer] = {}
        for contact in contacts:
            heard[contact.peer_id] = KnownPeer(contact.peer_id, contact.addresses, wall_now)
        heard |= {peer_id: peer for peer_id, peer in self._peers.items() if peer_id not in heard}
        self._peers = dict(itertools.islice(heard.items(), MAX_PEERS))

    def to_json(self) -> bytes:
        """As they are written down; :meth:`from_json` reads it."""
        return msgspec.json.format(msgspec.json.encode(_File(VERSION, list(self._peers.values())))) + b"\n"

    @classmethod
    def from_json(cls, raw: bytes, wall_now: float) -> KnownPeers:
        """Read what :meth:`to_json` wrote; addresses that cannot be read are skipped, and peers without any.

        Raises:
            ConfigError: it is something else, or of another version; says which.
        """
        try:
            version = msgspec.json.decode(raw, type=_Version).version
            if version != VERSION:
                raise ConfigError(f"it has version {version}, and this program reads version {VERSION}")
            file = msgspec.json.decode(raw, type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"it cannot be read: {error}") from error
        checked = (_checked(peer) for peer in file.peers)
        return cls(peer for peer in checked if peer is not None and wall_now - peer.seen_at < MAX_AGE_S)


def _checked(peer: KnownPeer) -> KnownPeer | None:
    try:
        public_key_of(PeerId(peer.peer_id))
    except ConfigError:
        return None
    addresses = [text for text in peer.addresses if _names(text, peer.peer_id)]
    return KnownPeer(peer.peer_id, addresses, peer.seen_at) if addresses else None


def _names(text: str, peer_id: str) -> bool:
    """Whether this is an address that can be dialled, of this peer if it names one."""
    try:
        address = Address.parse(text)
    except ConfigError:
        return False
    return address.port > 0 and not address.is_unspecified and address.peer_id in (None, peer_id)
