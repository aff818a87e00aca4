"""The state of a coordinator that survives a restart: used invitations, leases, bans and revoked invitations.

The files are written by temporary file, fsync and rename. The running coordinator writes ``members.json``, ``manyhands
ban`` writes ``bans.json``, and ``invite`` and ``run revoke-invitation`` write ``invitations.json``. So they never
overwrite each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from manyhands.access.charter import SignedCharter
from manyhands.access.invitation import Invitation
from manyhands.access.lease import Lease
from manyhands.access.messages import MAX_BANS, MemberEntry
from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId

FileBody = TypeVar("FileBody", bound=msgspec.Struct)

FOLDER = "coordinator"
KEPT_S = 7 * 86400.0
"""Seconds for which an expired invitation, or a member with an expired lease, stays in the accounts."""


class Uses(msgspec.Struct):
    """The peers that used an invitation, when it expires, and how many may use it; 0 if an older version wrote it."""

    expires_at: float
    peer_ids: list[str]
    uses: int = 0


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


class Invitations(msgspec.Struct):
    """The file of ``manyhands invite`` and ``run revoke-invitation``: by id, when each invitation expires."""

    issued: dict[str, float] = {}
    revoked: dict[str, float] = {}


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
        self.invitations = self._read("invitations.json", Invitations) or Invitations()

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

    def use(self, invitation: Invitation, peer_id: PeerId) -> None:
        """Count a use of an invitation; save it before the peer gets its lease."""
        uses = self.accounts.uses.setdefault(invitation.id.hex(), Uses(invitation.expires_at, [], invitation.uses))
        if peer_id not in uses.peer_ids:
            uses.peer_ids.append(peer_id)

    def used_by(self, peer_id: str) -> dict[str, Uses]:
        """Return the invitations that a peer has used, by id."""
        return {key: uses for key, uses in self.accounts.uses.items() if peer_id in uses.peer_ids}

    def note_issued(self, invitation: Invitation, wall_now: float) -> None:
        """Save that an invitation was made here, so that it can be revoked by its id.

        Raises:
            OSError: the file cannot be written.
        """
        self._change_invitations(wall_now)
        self.invitations.issued[invitation.id.hex()] = invitation.expires_at
        self._write("invitations.json", msgspec.json.encode(self.invitations))

    def revoke(self, invitation_id: str, wall_now: float, expires_at: float | None = None) -> list[str]:
        """Let no more peers in by an invitation.

        Args:
            invitation_id: in hexadecimal.
            expires_at: of the invitation, if it is at hand; else it must have been made here, or used here.
        Returns:
            The peers that have used it.
        Raises:
            ConfigError: no such invitation is known.
            OSError: the file cannot be written.
        """
        self._change_invitations(wall_now)
        uses = self.accounts.uses.get(invitation_id)
        if expires_at is None:
            expires_at = uses.expires_at if uses is not None else self.invitations.issued.get(invitation_id)
        if expires_at is None:
            raise ConfigError(
                f"invitation {invitation_id[:64]!r} was neither made nor used here; name the ticket itself, or an id "
                "that manyhands invite or manyhands members has shown"
            )
        self.invitations.revoked[invitation_id] = expires_at
        self._write("invitations.json", msgspec.json.encode(self.invitations))
        return uses.peer_ids if uses is not None else []

    def _change_invitations(self, wall_now: float) -> None:
        """Read the file before a change, and drop what has expired."""
        known = self._read("invitations.json", Invitations) or self.invitations
        issued, revoked = (
            {key: at for key, at in entries.items() if wall_now < at + KEPT_S}
            for entries in (known.issued, known.revoked)
        )
        self.invitations = Invitations(issued, revoked)

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
        """Read the bans and revoked invitations that commands have added; an unreadable file leaves the known ones.

        Raises:
            ConfigError: the file cannot be read.
        """
        self.bans = self._read("bans.json", Bans) or self.bans
        self.invitations = self._read("invitations.json", Invitations) or self.invitations

    def members(self) -> list[MemberEntry]:
        """Return all peers to which this coordinator has given a lease, or which it has banned."""
        held = self.accounts.members
        banned = self.bans.banned_at
        came_by = {peer_id: key for key, uses in self.accounts.uses.items() for peer_id in uses.peer_ids}
        nobody = HeldLease("", 0.0)
        return [
            MemberEntry(
                peer_id,
                held.get(peer_id, nobody).role,
                held.get(peer_id, nobody).expires_at,
                peer_id in banned,
                came_by.get(peer_id, ""),
            )
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
