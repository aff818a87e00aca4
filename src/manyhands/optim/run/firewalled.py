"""Connects a peer in client mode to those that need its state, and warns if no trainer of the run can be dialled."""

from __future__ import annotations

import asyncio
import logging
import math
import shlex

from manyhands.base.errors import PeerError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.run.tracker import ProgressTracker
from manyhands.peer import Presence
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
PERIOD_S = 60.0
PATIENCE_S = 3.0
"""Peers that start together learn of each other one by one."""


class Firewalled:
    """The duties of a trainer in client mode; none if it can be dialled. Lives on the network thread.

    Args:
        tasks: dial in the background.
    """

    def __init__(self, presence: Presence, tracker: ProgressTracker, run_id: str, tasks: TaskOwner) -> None:
        self._presence = presence
        self._endpoint = presence.endpoint
        self._tracker = tracker
        self._tasks = tasks
        self._notice = StrandedNotice(run_id)
        self._calling: asyncio.Task[None] | None = None

    def call_on_those_in_need(self) -> None:
        """Connect to peers that are behind, if only clients have the state: these peers can then ask for it."""
        if not self._endpoint.client_mode or (self._calling is not None and not self._calling.done()):
            return
        in_need = [peer_id for peer_id in self._tracker.in_need() if not self._endpoint.is_connected(peer_id)]
        if in_need:
            self._calling = self._tasks.spawn(self._call_on(in_need), name="calling on those who need the state")

    async def _call_on(self, peer_ids: list[PeerId]) -> None:
        for peer_id in peer_ids:
            try:
                await self._endpoint.call_on(peer_id, CALL_TIMEOUT_S)
            except (Unavailable, PeerError) as error:
                logger.debug("peer %s needs the state, and cannot be reached: %s", peer_id, error)

    def tell(self) -> None:
        """Warn every minute if no trainer of the run can be dialled."""
        num_trainers, ways_in = 0, []
        if self._tracker.is_stranded:
            num_trainers = 1 + len(self._tracker.reader.trainers())
            contacts = self._presence.dht.contacts()
            ways_in = [f"{text}/p2p/{contact.peer_id}" for contact in contacts for text in contact.addresses]
        self._notice.look(num_trainers, ways_in[:1], asyncio.get_running_loop().time())


class StrandedNotice:
    """Warns that no trainer of a run can be dialled, every minute as long as that lasts."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._due_at = math.inf

    def look(self, num_trainers: int, addresses: list[str], now: float) -> None:
        """Warn if it is time to.

        Args:
            num_trainers: all trainers, if none of them can be dialled; else 0. A single one misses no other.
            addresses: of any peer through which another one can join.
            now: seconds of a clock that never goes back.
        """
        if num_trainers < 2:
            self._due_at = math.inf
        elif self._due_at == math.inf:
            self._due_at = now + PATIENCE_S
        elif now >= self._due_at:
            self._due_at = now + PERIOD_S
            logger.warning("%s", describe_stranded(num_trainers, self._run_id, addresses))


def describe_stranded(num_trainers: int, run_id: str, addresses: list[str]) -> str:
    """The warning: what is wrong, what it means, and the command that fixes it."""
    return (
        f"All {num_trainers} peers that train are in client mode, so nobody can dial them and they make no step "
        "together; their gradients are kept. At least one of them must accept connections, or a machine without data "
        "helps: on the monitor's machine, or any other that accepts connections, run: "
        f"manyhands train --auxiliary --run-id {shlex.quote(run_id)} --initial-peers {' '.join(addresses) or 'ADDRESS'}"
    )
