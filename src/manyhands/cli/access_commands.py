"""``manyhands invite``, ``ban`` and ``members``: access to a run with a charter, for its owner and its coordinators."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, cast

from cyclopts import Parameter, Token, convert
from cyclopts.validators import Number

from manyhands.access import Invitation, Role, SignedCharter
from manyhands.access.invitation import ID_BYTES, MAX_USES, SignedInvitation
from manyhands.access.ledger import Ledger, Uses
from manyhands.access.managing import manage
from manyhands.access.messages import MemberEntry
from manyhands.base.errors import ConfigError, PeerError
from manyhands.base.folder_lock import FolderInUse, FolderLock
from manyhands.base.identity import Identity, PeerId, public_key_of
from manyhands.base.text import counted
from manyhands.base.ticket import Ticket, split_tickets
from manyhands.cli.ticket_command import print_ticket
from manyhands.peer import Peer

MAX_EXPIRES = timedelta(days=366)

MANAGE_TIMEOUT_S = 60.0


def _duration(kind: type[timedelta], tokens: Sequence[Token]) -> timedelta:
    """Convert a duration as cyclopts does. One that is too long for a timedelta is a wrong value too."""
    try:
        return cast(timedelta, convert(kind, tokens))
    except OverflowError as error:
        raise ValueError(str(error)) from None


@Parameter(name="*", group="Authority")
@dataclass(frozen=True, kw_only=True)
class PowerOptions:
    """A coordinator's state dir on its own machine, or the owner key, the charter and an address on any machine."""

    state_dir: Path | None = None
    """The state dir of a coordinator that runs, or ran, on this machine."""

    key: Path | None = None
    """The owner key, or the identity file of a coordinator; by default the identity in the state dir."""

    charter: Path | None = None
    """The charter of the run; by default the one that the coordinator with this state dir serves."""

    initial_peers: tuple[str, ...] = ()
    """Addresses of peers of the run; by default those of the coordinator with this state dir."""

    def ledger(self) -> Ledger:
        """The accounts of the coordinator on this machine, or an empty ledger without a state dir."""
        if self.state_dir is not None and not self.state_dir.is_dir():
            raise ConfigError(
                f"--state-dir {self.state_dir} is not a folder; name the one of a coordinator on this machine"
            )
        return Ledger(self.state_dir)

    def signed_charter(self, ledger: Ledger) -> SignedCharter:
        """The charter of the run.

        Raises:
            ConfigError: none was named or found.
        """
        charter = SignedCharter.load(self.charter) if self.charter is not None else ledger.load_charter()
        if charter is None:
            raise ConfigError(
                "no run is named; give the --state-dir of a coordinator on this machine that was started with "
                "--charter, or the owner key and the charter: --key RUN.key --charter RUN.charter"
            )
        return charter

    def identity(self, charter: SignedCharter) -> Identity:
        """The key that signs.

        Raises:
            ConfigError: the key is missing, or belongs to neither the owner nor a coordinator.
        """
        path = self.key or (self.state_dir / "identity.pem" if self.state_dir is not None else None)
        run = f"run {charter.run_id!r}"
        if path is None:
            raise ConfigError(
                f"{run} needs its owner key (--key FILE), or the --state-dir of one of its coordinators on this machine"
            )
        if not path.exists() and self.key is None:
            raise ConfigError(
                f"{path} does not exist: the coordinator was started with an --identity; name that file, too: "
                "--key FILE"
            )
        if not path.exists():
            raise ConfigError(
                f"key {path} does not exist. A lost owner key cannot be made again; the coordinators of {run} still "
                "invite and ban, on their machines: --state-dir DIR. Without them, begin a run with a new key: "
                "manyhands run create"
            )
        identity = Identity.load_or_create(path)
        if identity.peer_id not in charter.coordinators:
            raise ConfigError(
                f"key {path} is peer {identity.peer_id}, which is neither the owner nor a coordinator of {run}; "
                f"these are: {', '.join(charter.coordinators)}"
            )
        return identity


def invite(
    *,
    uses: Annotated[
        int, Parameter(help="Number of peers that can join with it.", validator=Number(gte=1, lte=MAX_USES))
    ] = 1,
    expires: Annotated[
        timedelta,
        Parameter(
            help="Lifetime of the ticket: 90s, 30m, 12h or 7d.", show_default=lambda _: "7d", converter=_duration
        ),
    ] = timedelta(days=7),
    peer: Annotated[
        str, Parameter(name="--for", help="Peer id of the only peer that may use it; by default any.")
    ] = "",
    role: Annotated[
        Role, Parameter(help="Role of the peers. An observer only downloads the state and measures.")
    ] = "trainer",
    power: PowerOptions = PowerOptions(),
) -> None:
    """Print a ticket that lets peers into a run by invitation.

    Any peer that has it can use it, so send it as you would a password. For example:

        manyhands invite --state-dir first-peer --uses 5 --expires 7d
    """
    if not timedelta(0) < expires <= MAX_EXPIRES:
        raise ConfigError(f"--expires is {expires}; it must be above 0 and at most {MAX_EXPIRES.days}d, for example 7d")
    if peer:
        public_key_of(PeerId(peer))
    ledger = power.ledger()
    charter = power.signed_charter(ledger)
    if charter.is_open:
        raise ConfigError(f"run {charter.run_id!r} is open: everybody can join it without an invitation")
    identity = power.identity(charter)
    addresses, _ = split_tickets(power.initial_peers or ledger.addresses())
    if not addresses:
        raise ConfigError("the ticket needs the address of a peer of the run: --initial-peers HOST:PORT or a multiaddr")
    # the owner need not be online, so the first coordinator counts the uses
    is_coordinator = identity.peer_id in charter.charter.coordinators
    counted_by = identity.peer_id if is_coordinator else charter.coordinators[0]
    expires_at = time.time() + expires.total_seconds()
    invitation = Invitation(charter.digest, secrets.token_bytes(ID_BYTES), uses, expires_at, counted_by, role, peer)
    token = SignedInvitation.sign(identity, invitation).signed.encoded()
    if power.state_dir is not None:
        ledger.note_issued(invitation, time.time())
    print_ticket(charter.run_id, addresses, charter=charter.digest, token=token)
    if role == "observer":
        print("An observer measures the run with: manyhands evaluate --initial-peers TICKET")  # noqa: T201
    else:
        print("The first trainer begins the run with: manyhands train --initial-peers TICKET")  # noqa: T201
    print(f"Its invitation has the id {invitation.id.hex()} (manyhands run revoke-invitation).")  # noqa: T201
    if not any(address.is_public for address in addresses):
        where = "this machine" if all(address.is_loopback for address in addresses) else "this network"
        print(  # noqa: T201
            f"The addresses in the ticket can be dialled from {where} only; for peers elsewhere name another one: "
            "--initial-peers HOST:PORT",
            file=sys.stderr,
        )


def ban(
    peer: Annotated[str, Parameter(help="Peer id, as the monitor and manyhands members show it.")],
    /,
    *,
    power: PowerOptions = PowerOptions(),
) -> None:
    """Ban a peer from a run for good. Within 20 s no member averages with it or gives it the state.

    On the machine of a coordinator, with its state dir, or with the owner key:

        manyhands ban 12D3KooW... --state-dir first-peer
        manyhands ban 12D3KooW... --key RUN.key --charter RUN.charter --initial-peers ADDRESS
    """
    public_key_of(PeerId(peer))
    ledger = power.ledger()
    charter = power.signed_charter(ledger)
    identity = power.identity(charter)
    if peer in charter.coordinators:
        raise ConfigError(f"{peer} is the owner or a coordinator of run {charter.run_id!r}; those cannot be banned")
    later = ""
    if power.state_dir is not None:
        ledger.ban(PeerId(peer), time.time())
        if not _is_in_use(power.state_dir):
            later = " The coordinator is stopped: the ban takes effect when it is started."
    entries = _ask(power, identity, charter, [PeerId(peer)]) if power.state_dir is None else []
    print(f"Peer {peer} is banned from run {charter.run_id}.{later}")  # noqa: T201
    _tell_who_came_with_it(peer, entries)
    for invitation_id, uses in ledger.used_by(peer).items():
        _tell_how_it_came(peer, invitation_id, uses, ledger)


def _tell_who_came_with_it(peer: str, entries: Sequence[MemberEntry]) -> None:
    """Say by which ticket a banned peer came, as far as the coordinators know; its number of uses they do not tell."""
    invitation_id = next((entry.invitation for entry in entries if entry.peer_id == peer), "")
    if not invitation_id:
        return
    others = [entry.peer_id for entry in entries if entry.invitation == invitation_id and entry.peer_id != peer]
    print(f"It came by invitation {invitation_id}; {counted(len(others), 'other peer')} came by it, too.")  # noqa: T201
    print(  # noqa: T201
        "If it is for several peers, the banned one may return with another id, until it is revoked on the machine of "
        f"the coordinator: manyhands run revoke-invitation {invitation_id} --state-dir DIR",
        *([f"The others: {' '.join(others)}"] if others else []),
        sep="\n",
    )


def _tell_how_it_came(peer: str, invitation_id: str, uses: Uses, ledger: Ledger) -> None:
    """Say whether a banned peer can return with another id by the ticket that it has."""
    if uses.uses == 1:
        print("Its ticket was for one peer, and is used up.")  # noqa: T201
    elif invitation_id not in ledger.invitations.revoked and time.time() < uses.expires_at:
        others = [other for other in uses.peer_ids if other != peer]
        print(  # noqa: T201
            f"Its ticket is for several peers ({len(others)} others have used it), so it may return with another id: "
            f"manyhands run revoke-invitation {invitation_id}",
            *([f"The others: {' '.join(others)}"] if others else []),
            sep="\n",
        )


def revoke_invitation(
    invitation: Annotated[str, Parameter(help="The ticket, or the id that invite and members show.")],
    /,
    *,
    power: PowerOptions = PowerOptions(),
) -> None:
    """Let nobody else in by a ticket. Peers that have used it stay; ban those that must leave.

    On the machine of the coordinator that redeems it, with its state dir:

        manyhands run revoke-invitation 0123456789abcdef01234567 --state-dir first-peer
    """
    if power.state_dir is None:
        raise ConfigError(
            "an invitation is revoked where its uses are counted; give the --state-dir of that coordinator, on its "
            "machine"
        )
    ledger = power.ledger()
    charter = power.signed_charter(ledger)
    expires_at = None
    if Ticket.is_one(invitation):
        try:
            signed = SignedInvitation.from_bytes(Ticket.parse(invitation).token, charter, "the ticket").invitation
        except PeerError as error:
            raise ConfigError(f"the ticket has no invitation to run {charter.run_id!r}: {error}") from error
        invitation, expires_at = signed.id.hex(), signed.expires_at
    came = ledger.revoke(invitation, time.time(), expires_at)
    print(f"Invitation {invitation} is revoked; {counted(len(came), 'peer')} had used it.")  # noqa: T201
    for peer_id in came:
        print(f"  {peer_id}{'  banned' if peer_id in ledger.bans.banned_at else ''}")  # noqa: T201


def members(*, power: PowerOptions = PowerOptions()) -> None:
    """List the peers that have a lease of a run, and the banned ones."""
    ledger = power.ledger()
    charter = power.signed_charter(ledger)
    identity = power.identity(charter)
    entries = ledger.members() if power.state_dir is not None else _ask(power, identity, charter)
    print(f"Run {charter.run_id}, access {charter.charter.access}: {len(entries)} known")  # noqa: T201
    for entry in entries:
        print(f"  {entry.peer_id}  {described(entry, time.time())}")  # noqa: T201


def described(entry: MemberEntry, wall_now: float) -> str:
    """The status of a member, for the terminal."""
    by = f", by invitation {entry.invitation}" if entry.invitation else ""
    if entry.is_banned:
        return f"banned{by}"
    left_h = (entry.expires_at - wall_now) / 3600
    if left_h > 0:
        return f"{entry.role}, lease for {left_h:.1f} h more{by}"
    return f"{entry.role}, lease expired {-left_h:.1f} h ago{by}"


def _ask(
    power: PowerOptions, identity: Identity, charter: SignedCharter, banned: list[PeerId] | None = None
) -> list[MemberEntry]:
    """Ask the coordinators of the run over the network."""
    if not power.initial_peers:
        raise ConfigError(
            "with a key and no --state-dir, the coordinators are asked over the network; name a peer of the run: "
            "--initial-peers HOST:PORT or a multiaddr"
        )
    addresses, _ = split_tickets(power.initial_peers)
    with Peer(addresses, client_mode=True, identity=identity) as own:
        asking = manage(own.endpoint, own.dht, charter, banned or [])
        return own.run(asking, MANAGE_TIMEOUT_S, "asking the coordinators")


def _is_in_use(state_dir: Path) -> bool:
    """Whether a process runs with this state dir."""
    try:
        FolderLock(state_dir, "state dir").release()
    except FolderInUse:
        return True
    return False
