"""The peers that a node has seen, for rejoining the swarm when the initial peers are gone.

Rules:
    * the :data:`MAX_PEERS` peers of the routing table that were heard of last are kept;
    * a lost peer is kept until as many others were heard of since: after an hour offline, all of them may be back;
    * they can be saved and loaded. A file may come from strangers: each entry is checked, an address is dialled with
      the peer id that it names, and entries older than :data:`MAX_AGE_S` are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Annotated

import msgspec

from manyhands.base.address import Address, AddressTexts
from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId, public_key_of
from manyhands.dht.routing import Contact

MAX_PEERS = 64
MAX_AGE_S = 30 * 86400.0
"""Age, in seconds, above which an entry is dropped: by then most addresses of volunteers belong to others."""

VERSION = 1


class KnownPeer(msgspec.Struct, frozen=True):
    """A peer as saved.

    Attributes:
        addresses: multiaddrs, best first.
        seen_at: when it was last heard of, in seconds since 1970 by the clock of the writer.
    """

    peer_id: Annotated[str, msgspec.Meta(max_length=64)]
    addresses: AddressTexts
    seen_at: float


class _SavedPeers(msgspec.Struct, frozen=True):
    version: int
    peers: Annotated[list[KnownPeer], msgspec.Meta(max_length=MAX_PEERS)]


class _Version(msgspec.Struct, frozen=True):
    version: int


class KnownPeers:
    """Peers in the order in which they were last heard of."""

    def __init__(self, peers: Iterable[KnownPeer] = ()) -> None:
        self._peers: dict[str, KnownPeer] = {peer.peer_id: peer for peer in peers}  # latest first

    def __len__(self) -> int:
        return len(self._peers)

    def latest_first(self) -> list[Contact]:
        """Return all peers, those heard of last first."""
        return [Contact(PeerId(peer.peer_id), peer.addresses) for peer in self._peers.values()]

    def heard_of(self, contacts: Iterable[Contact], wall_now: float) -> None:
        """Move contacts to the front, in their order; the oldest entries are dropped."""
        heard: dict[str, KnownPeer] = {}
        for contact in contacts:
            heard[contact.peer_id] = KnownPeer(contact.peer_id, contact.addresses, wall_now)
        heard |= {peer_id: peer for peer_id, peer in self._peers.items() if peer_id not in heard}
        self._peers = dict(itertools.islice(heard.items(), MAX_PEERS))

    def to_json(self) -> bytes:
        """Encode for :meth:`from_json`."""
        return msgspec.json.format(msgspec.json.encode(_SavedPeers(VERSION, list(self._peers.values())))) + b"\n"

    @classmethod
    def from_json(cls, raw: bytes, wall_now: float) -> KnownPeers:
        """Decode the output of :meth:`to_json`; unreadable addresses, and peers left without any, are skipped.

        Raises:
            ConfigError: unreadable, or of another version; the message says which.
        """
        try:
            version = msgspec.json.decode(raw, type=_Version).version
            if version != VERSION:
                raise ConfigError(f"it has version {version}, and this program reads version {VERSION}")
            file = msgspec.json.decode(raw, type=_SavedPeers)
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
    """Whether ``text`` is an address that can be dialled and names no other peer."""
    try:
        address = Address.parse(text)
    except ConfigError:
        return False
    return address.port > 0 and not address.is_unspecified and address.peer_id in (None, peer_id)
