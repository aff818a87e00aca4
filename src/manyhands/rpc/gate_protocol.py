"""The interface that decides which peers may take part in a run; :mod:`manyhands.access` implements it."""

from __future__ import annotations

from typing import Protocol

from manyhands.base.identity import PeerId


class Gate(Protocol):
    """Access control for the methods of one run."""

    def check(self, peer_id: PeerId, *, for_observers: bool) -> None:
        """Check that a peer has access.

        Args:
            for_observers: the call is also open to observers.
        Raises:
            Refused: the peer may not make this call.
        """

    def is_banned(self, peer_id: PeerId) -> bool:
        """Whether a peer is banned from the run."""

    async def meet(self, peer_id: PeerId, timeout_s: float) -> None:
        """Exchange credentials with a peer, unless that was done.

        Raises:
            Refused, ProtocolViolation, BadSignature: the other peer is of another run, or has no valid credentials.
            Unavailable: it does not answer.
        """

    def forget_meeting(self, peer_id: PeerId) -> bool:
        """Drop the exchange with a peer that no longer knows this one; return whether there was one."""
