"""The DHT records of training runs: their schemas, the runs that they show, and who begins one. Imports no torch.

A peer takes seconds from its start to the run manifest: it loads torch, reads its data and builds the model. So it
announces that it begins a run. Others that start meanwhile wait for the manifest, instead of making another one from
their own settings.
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
"""Runs whose peers are counted, besides the wanted one."""
SHOWN_RUNS = 8
BEGINNING = Schema(bool, is_owned=True, max_ttl_s=RECORD_S)
"""A peer that dies while it begins the run is waited for until this has expired."""


def declare_run(dht: DhtNode, run_id: str) -> None:
    """Make the node of a peer of the run refuse, and not return, records that do not fit."""
    dht.declare(peer_key(run_id, PROGRESS_KIND), PEER_RECORD)
    dht.declare(beginning_key(run_id), BEGINNING)
    for kind in (MetricsRecord, HeldoutRecord, AccountRecord):
        dht.declare(metrics_key(run_id, kind), Schema(kind, is_owned=True, max_ttl_s=DAY_S))
    # compressed; the reader checks the rest
    dht.declare(manifest_key(run_id), Schema(bytes, is_owned=True, max_ttl_s=DAY_S))


class Run(NamedTuple):
    """A run as its records in the DHT show it: its settings, who signed them, and each peer's progress.

    Attributes:
        manifest: None while no peer trains in it, as when only its monitor was started.
        beginners: the peers that are making the manifest now, if there is none.
    """

    run_id: str
    manifest: RunManifest | None
    peers: dict[PeerId, PeerRecord]
    signers: Sequence[PeerId]
    beginners: Sequence[PeerId] = ()

    @property
    def is_trained(self) -> bool:
        """Whether a peer trains in it now; the manifest outlives the peers that signed it."""
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
    """The runs that other nodes take part in or hold the manifest of, the largest first.

    Args:
        wanted: a run to look up even if the asked nodes do not know it.
        expected: of the manifests of some runs, as for :func:`look_up_run`.
    """
    known = sorted(filter(is_run_id, await dht.topics(MANIFEST_KIND)))
    run_ids = [*known[:MAX_RUNS], *([wanted] if wanted is not None and wanted not in known[:MAX_RUNS] else [])]
    runs = await asyncio.gather(*(look_up_run(dht, run_id, expected.get(run_id, b"")) for run_id in run_ids))
    found = [run for run in runs if run.run_id in known or run.manifest is not None or run.peers]
    return sorted(found, key=lambda run: -len(run.peers))


def listed(runs: Sequence[Run]) -> str:
    more = f" and {len(runs) - SHOWN_RUNS} more" if len(runs) > SHOWN_RUNS else ""
    return ", ".join(map(str, runs[:SHOWN_RUNS])) + more


def nobody_is_in(run_id: str, num_joined: int, runs: Sequence[Run]) -> str:
    """The message for a run that no other peer knows: most often its name was mistyped."""
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
