"""The folder in which one peer keeps what it needs after a restart: its identity, its port, the addresses of others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from manyhands.base.errors import ConfigError
from manyhands.base.folder_lock import FolderInUse, FolderLock
from manyhands.dht import KnownPeers

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
WRITE_TIMEOUT_S = 1.0
ADDRESSES = "addresses"


class StateDir:
    """A folder that this process locks until :meth:`close`. It is created if missing.

    Attributes:
        path: of the folder, where other parts keep files as well.
        is_new: whether this object created the folder.
        identity_path: the private key, unless the user named another file.
        peers_path: the addresses of other peers.
        port_path: the port that this peer got at its last start, if it asked for a free one.
        addresses_path: where others on this machine dial this peer.
    Raises:
        FolderInUse: another process uses it.
        ConfigError: it cannot be used at all.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._writing = threading.Lock()
        self.identity_path = self.path / "identity.pem"
        self.peers_path = self.path / "peers.json"
        self.port_path = self.path / "port"
        self.addresses_path = self.path / ADDRESSES
        self._lock = FolderLock(self.path, "state dir")
        self.is_new = self._lock.is_new

    def load_peers(self) -> KnownPeers:
        """The known peers; none, with a warning, if the file is damaged."""
        try:
            with self.peers_path.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
            if len(raw) > MAX_FILE_BYTES:
                raise ConfigError(f"it has more than {MAX_FILE_BYTES} bytes")
            return KnownPeers.from_json(raw, time.time())
        except FileNotFoundError:
            pass
        except (ConfigError, OSError) as error:
            logger.warning("The known peers in %s are ignored: %s; the file will be replaced", self.peers_path, error)
        return KnownPeers()

    def save_peers(self, raw: bytes) -> None:
        """Write the output of :meth:`KnownPeers.to_json`."""
        self._save(self.peers_path, raw)

    def load_port(self) -> int:
        """The port of the last start; 0 if there is none."""
        with suppress(OSError, ValueError):
            port = int(self.port_path.read_text())
            return port if 0 < port < 1 << 16 else 0
        return 0

    def save_port(self, port: int) -> None:
        """Write down the port that this peer got."""
        if port != self.load_port():
            self._save(self.port_path, str(port).encode())

    def save_addresses(self, addresses: Sequence[str]) -> None:
        """Write down where others on this machine dial this peer, for :func:`addresses_of_running`."""
        self._save(self.addresses_path, "\n".join(addresses).encode())

    def _save(self, path: Path, raw: bytes) -> None:
        """Write a file atomically: readers see the old one or the new one."""
        if not self._writing.acquire(timeout=WRITE_TIMEOUT_S):  # another thread is writing to a hanging disk
            return
        draft = path.with_suffix(".new")
        try:
            draft.write_bytes(raw)
            draft.replace(path)
        except OSError as error:
            logger.warning("Cannot write %s: %s", path, error.strerror)
        finally:
            self._writing.release()

    def close(self) -> None:
        """Unlock the folder. May be called twice."""
        self._lock.release()


def addresses_of_running(path: Path) -> list[str]:
    """The addresses of the peer that keeps its state in a folder; none if no process uses the folder now."""
    try:
        addresses = (path / ADDRESSES).read_text().split()
        FolderLock(path, "addresses").release()
    except FolderInUse:
        return addresses
    except (ConfigError, OSError, ValueError):
        pass
    return []
