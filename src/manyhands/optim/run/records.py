"""The DHT records of training runs: their schemas, and the runs that they show. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from manyhands.averaging.peer_records import GOODBYE, PEER_RECORD, PROGRESS_KIND, PeerRecord, peer_key
from manyhands.averaging.timing import DAY_S
from manyhands.base.identity import PeerId
from manyhands.base.run_id import is_run_id
from manyhands.base.text import counted
from manyhands.dht import DhtNode, Schema
from manyhands.optim.manifest import MANIFEST_KIND, RunManifest, manifest_key, read_manifest
from manyhands.optim.metrics import AccountRecord, HeldoutRecord, MetricsRecord, metrics_key
from manyhands.optim.run.beginning import BEGINNING, beginning_key, peers_beginning

MAX_RUNS = 64
"""Runs whose peers are counted, besides the wanted one."""
SHOWN_RUNS = 8


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
