"""Decides whether a peer gets a lease, and for which role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from manyhands.access.charter import SignedCharter
from manyhands.access.invitation import SignedInvitation
from manyhands.access.lease import Role
from manyhands.access.ledger import Ledger
from manyhands.base.errors import PeerError, Refused
from manyhands.base.identity import PeerId
from manyhands.base.text import counted

NOT_INVITED = "not_invited"
"""Code of a permanent refusal: another attempt gets the same answer."""


class Authorizer(Protocol):
    """Decides which peers get a lease from a coordinator.

    A custom one may ask a login service, as in ``examples/hub_login.py``.
    """

    async def authorize(self, peer_id: PeerId, credential: bytes) -> Role:
        """Return the role for which a peer gets a lease.

        Args:
            peer_id: the peer, which has proved that it has the key of this id.
            credential: what the peer sent, at most 4 KiB: the token of its ticket by default.
        Raises:
            Refused: the peer gets no lease; the message tells its user what to do.
            Unavailable: the decision cannot be made now.
        """


class Open:
    """Gives every peer a trainer's lease."""

    async def authorize(self, peer_id: PeerId, credential: bytes) -> Role:
        """Return the role of a trainer."""
        return "trainer"


class Invited:
    """Gives leases to peers with an invitation that is not used up.

    Args:
        own_id: the peer id of the coordinator. It redeems only invitations that name it, so that none is used more
            often than allowed.
    """

    def __init__(self, charter: SignedCharter, own_id: PeerId, ledger: Ledger, wall_clock: Callable[[], float]) -> None:
        self._charter = charter
        self._own_id = own_id
        self._ledger = ledger
        self._wall_clock = wall_clock

    async def authorize(self, peer_id: PeerId, credential: bytes) -> Role:
        """Return the role of the invitation, which is counted as used."""
        if not credential:
            raise Refused(
                peer_id,
                NOT_INVITED,
                f"run {self._charter.run_id!r} is by invitation, and this ticket contains none; ask its coordinator "
                "for one (manyhands invite)",
            )
        try:
            invitation = SignedInvitation.from_bytes(credential, self._charter, peer_id).invitation
        except PeerError as error:
            raise Refused(peer_id, NOT_INVITED, f"{error}; ask for another ticket") from error
        if invitation.coordinator != self._own_id:
            raise Refused(peer_id, "not_here", f"the invitation is redeemed by coordinator {invitation.coordinator}")
        if invitation.peer_id not in ("", peer_id):
            raise Refused(
                peer_id,
                NOT_INVITED,
                f"the invitation is for peer {invitation.peer_id}, and this one is {peer_id}; start with the "
                "--state-dir (or --identity) of that peer, or ask for another ticket",
            )
        if invitation.id.hex() in self._ledger.invitations.revoked:
            raise Refused(peer_id, NOT_INVITED, "the invitation was revoked; ask for another ticket")
        if self._wall_clock() > invitation.expires_at:
            raise Refused(peer_id, NOT_INVITED, "the invitation has expired; ask for another ticket")
        if self._ledger.num_uses(invitation.id, peer_id) >= invitation.uses:
            raise Refused(
                peer_id,
                NOT_INVITED,
                f"the invitation was for {counted(invitation.uses, 'peer')} and is used up; ask for another ticket",
            )
        self._ledger.use(invitation, peer_id)
        return invitation.role
