"""The DHT records of training runs: their schemas, the runs that they show, and which peer begins a run.

Between its start and its run manifest a peer loads torch, reads its data and builds the model, which takes seconds. So
it announces at once that it begins the run. Other peers that start meanwhile wait for the manifest, instead of making
another one from their own settings. This module imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from manyhands.averaging.peer_records import GOODBYE, KEEP_ALIVES, PEER_RECORD, PROGRESS_KIND, PeerRecord, peer_key
from manyhands.averaging.timing import BRIEF_S, DAY_S, RECORD_S
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.base.run_id import is_run_id
from manyhands.base.text import counted
from manyhands.dht import DhtNode, Schema
from manyhands.optim.manifest import MANIFEST_KIND, RunManifest, manifest_key, read_manifest
from manyhands.optim.metrics import AccountRecord, HeldoutRecord, MetricsRecord, metrics_key
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

MAX_RUNS = 64
"""The largest number of runs that are looked up, besides the wanted one."""
SHOWN_RUNS = 8
BEGINNING = Schema(bool, is_owned=True, max_ttl_s=RECORD_S)
"""The announcement that a peer begins a run. If that peer dies, the others wait until it has expired."""


def declare_run(dht: DhtNode, run_id: str) -> None:
    """Declare the schemas of a run's records, so that this node neither stores nor returns records that break them."""
    dht.declare(peer_key(run_id, PROGRESS_KIND), PEER_RECORD)
    dht.declare(beginning_key(run_id), BEGINNING)
    for kind in (MetricsRecord, HeldoutRecord, AccountRecord):
        dht.declare(metrics_key(run_id, kind), Schema(kind, is_owned=True, max_ttl_s=DAY_S))
    # the value is compressed, and its readers check what is in it
    dht.declare(manifest_key(run_id), Schema(bytes, is_owned=True, max_ttl_s=DAY_S))


class Run(NamedTuple):
    """A run as its records in the DHT show it.

    Attributes:
        manifest: its settings; None while no peer has signed any, as when only its monitor was started.
        peers: the progress record of each peer.
        signers: the peers that have signed the manifest.
        beginners: the peers that are making the manifest now, if there is none.
    """

    run_id: str
    manifest: RunManifest | None
    peers: dict[PeerId, PeerRecord]
    signers: Sequence[PeerId]
    beginners: Sequence[PeerId] = ()

    @property
    def is_trained(self) -> bool:
        """Whether a peer trains in it now. A manifest alone does not say so: it outlives the peers that signed it."""
        return self.manifest is not None and self.has_trainers

    @property
    def has_trainers(self) -> bool:
        return any(not record.is_auxiliary for record in self.peers.values())

    def __str__(self) -> str:
        return f"{self.run_id!r} ({counted(len(self.peers), 'peer')})"


async def look_up_run(dht: DhtNode, run_id: str, expected: bytes = b"") -> Run:
    """Read the settings of a run and its peers' records; the arguments and errors are those of ``read_manifest``."""
    signed, progress = await asyncio.gather(
        read_manifest(dht, run_id, expected), dht.get(peer_key(run_id, PROGRESS_KIND))
    )
    peers = {}
    for subkey, stored in progress.items():
        with suppress(msgspec.DecodeError):
            if stored.owner == subkey and (record := PEER_RECORD.decode(stored.raw)) != GOODBYE:
                peers[PeerId(subkey)] = record
    if signed is None:
        return Run(run_id, None, peers, [], await peers_beginning(dht, run_id))
    return Run(run_id, signed.manifest, peers, signed.signers)


async def find_runs(dht: DhtNode, wanted: str | None = None, expected: Mapping[str, bytes] = {}) -> list[Run]:
    """Find the runs that other nodes take part in, or whose manifest they hold; the largest run comes first.

    Args:
        wanted: a run to look up even if the asked nodes do not know it.
        expected: by run id, the argument ``expected`` of :func:`look_up_run`.
    """
    known = sorted(filter(is_run_id, await dht.topics(MANIFEST_KIND)))
    run_ids = [*known[:MAX_RUNS], *([wanted] if wanted is not None and wanted not in known[:MAX_RUNS] else [])]
    runs = await asyncio.gather(*(look_up_run(dht, run_id, expected.get(run_id, b"")) for run_id in run_ids))
    found = [run for run in runs if run.run_id in known or run.manifest is not None or run.peers]
    return sorted(found, key=lambda run: -len(run.peers))


def listed(runs: Sequence[Run]) -> str:
    """The first ``SHOWN_RUNS`` runs, for a message."""
    more = f" and {len(runs) - SHOWN_RUNS} more" if len(runs) > SHOWN_RUNS else ""
    return ", ".join(map(str, runs[:SHOWN_RUNS])) + more


def nobody_is_in(run_id: str, num_joined: int, runs: Sequence[Run]) -> str:
    """The message for a run that no other peer knows. Most often its name was mistyped, so it lists the known ones."""
    here = f"runs here: {listed(runs)}" if runs else "they know of no run"
    return f"joined {counted(num_joined, 'peer')}; none of them is in run {run_id!r}; {here}"


# beginning a run


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
    """This peer's announcement that it begins a run. It is renewed until the run has a manifest."""

    dht: DhtNode
    own_id: PeerId
    run_id: str

    def __post_init__(self) -> None:
        self._tasks = TaskOwner("beginning of a run")

    async def announce(self) -> bool:
        """Announce that this peer begins the run, unless another peer does; returns whether this one begins it.

        Raises:
            Unavailable: the DHT does not answer.
        """
        # an announcement of this peer itself is left from an earlier start
        if set(await peers_beginning(self.dht, self.run_id)) - {self.own_id}:
            return False
        await self._store(True)
        # if two peers have announced it at once, both see both announcements, and the lower id begins
        if min(await peers_beginning(self.dht, self.run_id), default=self.own_id) != self.own_id:
            await self.close()
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
