"""Asks a member of a round whether it is there and makes progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from manyhands.averaging.messages import Count, Digest, Group, PeerIdText
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.identity import PeerId
from manyhands.rpc import Method

PROBE_S = 2.0
"""A member that does not answer for this long is considered gone,"""
MAX_PROBE_S = 8.0
"""or for this long on a slow link: then heartbeats end the connection anyway."""
QUEUED_BYTES = 16 * 1024
"""Bytes of a round that may be queued before an answer."""


def answer_time_s(*bytes_per_s: float) -> float:
    """Timeout of an answer during a round, over a link that carries at least this much; 0 if unknown."""
    slowest = min((rate for rate in bytes_per_s if rate > 0), default=float("inf"))
    return min(max(PROBE_S, QUEUED_BYTES / slowest), MAX_PROBE_S)


class MovedQuery(msgspec.Struct):
    """Asks a member for the progress of its exchange.

    Attributes:
        leader: of the group.
    """

    group_id: Digest
    leader: PeerIdText


class Moved(msgspec.Struct):
    """A member's progress.

    Attributes:
        amount: grows with progress: bytes sent and received in this exchange, and chunks averaged.
        is_gone: it is not in this round, and waits for no group of that leader.
    """

    amount: Count = 0
    is_gone: bool = False


ASK_MOVED = Method("averaging.ask_moved", MovedQuery, Moved)


class Probing:
    """Asks others for their progress, and reports this peer's.

    Args:
        is_here: whether this peer is in the round of a leader's group, or may still come to it.
    """

    def __init__(self, endpoint: RunEndpoint, is_here: Callable[[bytes, PeerId], bool]) -> None:
        self._endpoint = endpoint
        self._is_here = is_here
        self._amounts: dict[bytes, Callable[[], int]] = {}
        endpoint.handle(ASK_MOVED, self._on_ask)

    def close(self) -> None:
        self._endpoint.unhandle(ASK_MOVED)

    @contextmanager
    def of(self, group: Group, amount: Callable[[], int]) -> Iterator[None]:
        """Report ``amount`` to the members of a group within the block."""
        self._amounts[group.group_id] = amount
        try:
            yield
        finally:
            del self._amounts[group.group_id]

    async def ask(self, group: Group, rank: int, timeout_s: float) -> Moved:
        """Ask a member for its progress.

        Raises:
            Unavailable, PeerError: it does not answer.
        """
        query = MovedQuery(group.group_id, group.leader)
        return await self._endpoint.call(group.members[rank].peer_id, ASK_MOVED, query, timeout_s)

    def _on_ask(self, remote: PeerId, query: MovedQuery) -> Moved:
        amount = self._amounts.get(query.group_id)
        return Moved(amount() if amount is not None else 0, is_gone=not self._is_here(query.group_id, query.leader))
