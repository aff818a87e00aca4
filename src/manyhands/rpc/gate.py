"""What decides who may take part in a run; see :mod:`manyhands.access`, which has it."""

from __future__ import annotations

from typing import Protocol

from manyhands.base.identity import PeerId


class Gate(Protocol):
    """Knows which peers may call the methods of one run, and may be called."""

    def check(self, peer_id: PeerId, *, for_observers: bool) -> None:
        """Let a peer pass.

        Args:
            for_observers: what it wants to do is also for peers that only look.
        Raises:
            Refused: it may not do this.
        """

    async def meet(self, peer_id: PeerId, timeout_s: float) -> None:
        """Show each other what lets both pass, unless that was done.

        Raises:
            Refused, ProtocolViolation, BadSignature: the other peer is of another run, or has nothing that counts.
            Unavailable: it does not answer.
        """

    def forget_meeting(self, peer_id: PeerId) -> bool:
        """The other peer does not know this one any more; returns whether they had met."""
