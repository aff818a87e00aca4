"""Announces that a peer begins a run. Imports no torch.

A peer takes seconds from its start to the run manifest: it loads torch, reads its data and builds the model. Others
that start meanwhile wait for the manifest, instead of making another one from their own settings.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from manyhands.averaging.peer_records import KEEP_ALIVES
from manyhands.averaging.timing import BRIEF_S, RECORD_S
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.dht import DhtNode, Schema
from manyhands.optim.manifest import read_manifest
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

BEGINNING = Schema(bool, is_owned=True, max_ttl_s=RECORD_S)
"""A peer that dies while it begins the run is waited for until this has expired."""


def beginning_key(run_id: str) -> str:
    """The DHT key under which peers announce that they begin a run."""
    return f"{run_id}.beginning"


async def peers_beginning(dht: DhtNode, run_id: str) -> list[PeerId]:
    """The peers that are making the manifest of a run now.

    Raises:
        Unavailable: the DHT does not answer.
    """
    announced = await dht.get(beginning_key(run_id))
    return [PeerId(subkey) for subkey, stored in announced.items() if stored.owner == subkey]


@dataclass(eq=False)
class Beginning:
    """The announcement of this peer; it ends when the run has a manifest."""

    dht: DhtNode
    own_id: PeerId
    run_id: str

    def __post_init__(self) -> None:
        self._tasks = TaskOwner("beginning of a run")

    async def announce(self) -> bool:
        """Announce that this peer begins the run, unless another one does; returns whether it is this peer.

        Raises:
            Unavailable: the DHT does not answer.
        """
        if set(await peers_beginning(self.dht, self.run_id)) - {self.own_id}:  # own one: of an earlier start
            return False
        await self._store(True)
        if min(await peers_beginning(self.dht, self.run_id), default=self.own_id) != self.own_id:
            await self.close()  # of two that announced it at once, both see both
            return False
        self._tasks.spawn(self._keep_alive(), name="keeping it alive")
        return True

    async def close(self) -> None:
        """Withdraw the announcement."""
        await self._tasks.close()
        try:
            async with time_limit(BRIEF_S, "withdrawing the beginning of a run"):
                await self._store(None)
        except ManyhandsError as error:
            logger.debug("the beginning of run %s expires by itself: %s", self.run_id, error)

    async def _store(self, value: bool | None) -> None:
        await self.dht.store(beginning_key(self.run_id), value, RECORD_S, subkey=self.own_id)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(RECORD_S / KEEP_ALIVES)
            try:
                if await read_manifest(self.dht, self.run_id) is not None:
                    return
                await self._store(True)
            except ManyhandsError as error:
                logger.debug("the beginning of run %s was not renewed: %s", self.run_id, error)
