"""The state of a coordinator that survives a restart: used invitations, leases and bans.

The files are written by temporary file, fsync and rename. The running coordinator writes one of them and ``manyhands
ban`` the other, so they never overwrite each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from manyhands.access.charter import SignedCharter
from manyhands.access.lease import Lease
from manyhands.access.messages import MAX_BANS, MemberEntry
from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId

FileBody = TypeVar("FileBody", bound=msgspec.Struct)

FOLDER = "coordinator"
KEPT_S = 7 * 86400.0
"""Seconds for which an expired invitation, or a member with an expired lease, stays in the accounts."""


class Uses(msgspec.Struct):
    """The peers that used an invitation, and when it expires."""

    expires_at: float
    peer_ids: list[str]


class HeldLease(msgspec.Struct):
    """The last lease of a peer."""

    role: str
    expires_at: float


class Accounts(msgspec.Struct):
    """The file of the running coordinator."""

    uses: dict[str, Uses] = {}
    members: dict[str, HeldLease] = {}


class Bans(msgspec.Struct):
    """The file of ``manyhands ban``: when each peer was banned."""

    banned_at: dict[str, float] = {}


class CoordinatorAddresses(msgspec.Struct):
    """Addresses of the coordinator, for the tickets of ``manyhands invite``."""

    addresses: list[str]


class Ledger:
    """The files of one coordinator, in a folder of its state dir.

    Args:
        state_dir: the state dir of the coordinator; None to keep nothing on disk.
    Raises:
        ConfigError: a file cannot be read.
    """

    def __init__(self, state_dir: Path | None) -> None:
        self._folder = state_dir / FOLDER if state_dir is not None else None
        self.accounts = self._read("members.json", Accounts) or Accounts()
        self.bans = self._read("bans.json", Bans) or Bans()

    # the charter

    def load_charter(self) -> SignedCharter | None:
        """Return the charter that a coordinator with this state dir served last; None if there is none."""
        path = self._folder / "charter" if self._folder is not None else None
        return SignedCharter.load(path) if path is not None and path.exists() else None

    def keep_charter(self, charter: SignedCharter) -> None:
        """Save the charter.

        Raises:
            ConfigError: the state dir belongs to a coordinator of another charter.
        """
        kept = self.load_charter()
        if kept is None and self._folder is not None:
            self._make_folder()
            charter.save(self._folder / "charter")
        elif kept is not None and kept.digest != charter.digest:
            raise ConfigError(
                f"{self._folder} belongs to a coordinator of run {kept.run_id!r} with another charter; name another "
                "--state-dir, one for each charter"
            )

    def note_addresses(self, addresses: list[str]) -> None:
        """Save the current addresses of this coordinator."""
        self._write("address.json", msgspec.json.encode(CoordinatorAddresses(addresses)))

    def addresses(self) -> list[str]:
        """Return the addresses that were saved last."""
        place = self._read("address.json", CoordinatorAddresses)
        return place.addresses if place is not None else []

    # invitations and leases

    def num_uses(self, invitation_id: bytes, peer_id: PeerId) -> int:
        """Return the number of other peers that have used an invitation."""
        uses = self.accounts.uses.get(invitation_id.hex())
        return len(set(uses.peer_ids) - {peer_id}) if uses is not None else 0

    def use(self, invitation_id: bytes, expires_at: float, peer_id: PeerId) -> None:
        """Count a use of an invitation; save it before the peer gets its lease."""
        uses = self.accounts.uses.setdefault(invitation_id.hex(), Uses(expires_at, []))
        if peer_id not in uses.peer_ids:
            uses.peer_ids.append(peer_id)

    def enter(self, lease: Lease) -> None:
        """Record a lease; save it before the peer gets it."""
        self.accounts.members[lease.peer_id] = HeldLease(lease.role, lease.expires_at)

    def to_save(self, wall_now: float) -> Callable[[], None]:
        """Drop expired entries; return a function that writes the accounts as they are now, on any thread.

        The function raises ``OSError`` if the file cannot be written.
        """
        accounts = self.accounts
        accounts.uses = {key: uses for key, uses in accounts.uses.items() if wall_now < uses.expires_at + KEPT_S}
        accounts.members = {key: held for key, held in accounts.members.items() if wall_now < held.expires_at + KEPT_S}
        return partial(self._write, "members.json", msgspec.json.encode(accounts))

    # bans

    def ban(self, peer_id: PeerId, wall_now: float) -> None:
        """Ban a peer for good.

        Raises:
            ConfigError: too many are banned already.
            OSError: the file cannot be written.
        """
        self.bans = self._read("bans.json", Bans) or self.bans
        if peer_id not in self.bans.banned_at and len(self.bans.banned_at) >= MAX_BANS:
            raise ConfigError(
                f"{MAX_BANS} peers are banned, the most that a charter allows; make a new charter, and give new "
                "tickets to all peers that may stay"
            )
        self.bans.banned_at.setdefault(peer_id, wall_now)
        self._write("bans.json", msgspec.json.encode(self.bans))

    def read_bans(self) -> None:
        """Read the bans that ``manyhands ban`` has added; an unreadable file leaves the known ones in place.

        Raises:
            ConfigError: the file cannot be read.
        """
        self.bans = self._read("bans.json", Bans) or self.bans

    def members(self) -> list[MemberEntry]:
        """Return all peers to which this coordinator has given a lease, or which it has banned."""
        held = self.accounts.members
        banned = self.bans.banned_at
        return [
            MemberEntry(peer_id, held[peer_id].role, held[peer_id].expires_at, peer_id in banned)
            if peer_id in held
            else MemberEntry(peer_id, is_banned=True)
            for peer_id in sorted(held.keys() | banned.keys())
        ]

    # files

    def _read(self, name: str, kind: type[FileBody]) -> FileBody | None:
        if self._folder is None:
            return None
        path = self._folder / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; make it readable for this user") from error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}; restore it from a backup, or remove it, which forgets the "
                "entries in it"
            ) from error

    def _make_folder(self) -> None:
        assert self._folder is not None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _write(self, name: str, content: bytes) -> None:
        if self._folder is not None:
            self._make_folder()
            write_whole(self._folder / name, msgspec.json.format(content) + b"\n")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash it has the old content or the new one.

    Raises:
        OSError: it cannot be written; the old content is still there.
    """
    draft = path.with_name(path.name + ".new")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
