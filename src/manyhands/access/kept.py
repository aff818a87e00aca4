"""Keeps a run's charter and a peer's own lease in its state dir, for restarts while no coordinator is online."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from manyhands.access.charter import SignedCharter
from manyhands.access.lease import SignedLease
from manyhands.access.ledger import write_whole
from manyhands.access.signed import MAX_BYTES, UNREADABLE
from manyhands.base.errors import PeerError
from manyhands.base.identity import PeerId
from manyhands.base.structs import make_ready

logger = logging.getLogger(__name__)


class _LeaseFile(msgspec.Struct):
    charter: bytes
    lease: bytes


make_ready(_LeaseFile)


class KeptLease:
    """The file of one run; an unreadable file counts as missing."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._path = folder / f"lease-{run_id}"
        self._file = self._read()

    def _read(self) -> _LeaseFile | None:
        try:
            with self._path.open("rb") as file:
                return msgspec.msgpack.decode(file.read(3 * MAX_BYTES), type=_LeaseFile)
        except FileNotFoundError:
            pass
        except (OSError, *UNREADABLE) as error:
            logger.warning(
                "Cannot read the lease in %s: %s; this peer asks a coordinator for a new one", self._path, error
            )
        return None

    def charter(self, digest: bytes) -> SignedCharter | None:
        """Return the saved charter, if it has this digest."""
        if self._file is None:
            return None
        try:
            kept = SignedCharter.from_bytes(self._file.charter, str(self._path))
        except PeerError:
            return None
        return kept if kept.digest == digest else None

    def lease(self, charter: SignedCharter, peer_id: PeerId) -> SignedLease | None:
        """Return the saved lease, if it is of this charter and this peer."""
        if self._file is None:
            return None
        try:
            return SignedLease.from_bytes(self._file.lease, charter, peer_id)
        except PeerError:
            return None

    def write(self, charter: SignedCharter, held: SignedLease) -> None:
        """Save a charter and a lease; an error is only logged."""
        try:
            content = _LeaseFile(charter.signed.encoded(), held.signed.encoded())
            write_whole(self._path, msgspec.msgpack.encode(content))
        except OSError as error:
            logger.warning(
                "Cannot save the lease in %s: %s; after a restart this peer has to ask a coordinator again",
                self._path,
                error.strerror,
            )
