"""Which training runs the peers of a swarm take part in. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from manyhands.base.errors import ConfigError
from manyhands.base.identity import PeerId
from manyhands.base.run_id import checked_run_id
from manyhands.base.words import counted
from manyhands.dht import DhtNode
from manyhands.optim.progress import ProgressRecord
from manyhands.optim.progress_reader import GOODBYE, PROGRESS, PROGRESS_KIND, progress_key
from manyhands.optim.run_manifest import MANIFEST_KIND, RunManifest, read_manifests, run_manifest_of

MAX_RUNS = 16
"""Runs whose peers are counted; a longer list helps nobody."""


class Run(NamedTuple):
    """A run as its records in the DHT show it.

    Attributes:
        manifest: its settings; None while nobody trains in it, as when only its monitor was started.
        peers: the latest progress record of each peer, this one excepted.
        signers: the peers that signed the manifest.
    """

    run_id: str
    manifest: RunManifest | None
    peers: dict[PeerId, ProgressRecord]
    signers: Sequence[PeerId]

    def __str__(self) -> str:
        return f"{self.run_id!r} ({counted(len(self.peers), 'peer')})"


async def find_run_ids(dht: DhtNode) -> list[str]:
    """The runs that other nodes take part in or hold records of, in alphabetical order."""
    topics = await asyncio.gather(dht.topics(PROGRESS_KIND), dht.topics(MANIFEST_KIND))
    return sorted(filter(_is_run_id, set().union(*topics)))


async def look_up_run(dht: DhtNode, run_id: str) -> Run:
    """Read the settings of a run, and what its peers say.

    Raises:
        Unavailable: the DHT does not answer.
    """
    manifests, progress = await asyncio.gather(read_manifests(dht, run_id), dht.get(progress_key(run_id)))
    peers = {}
    for subkey, stored in progress.items():
        if stored.owner != subkey:
            continue
        try:
            record = PROGRESS.decode(stored.raw)
        except msgspec.DecodeError:
            continue
        if record != GOODBYE:
            peers[PeerId(subkey)] = record
    manifest = run_manifest_of(manifests)
    signers = [peer_id for peer_id, signed in manifests.items() if signed == manifest]
    return Run(run_id, manifest, peers, signers)


async def find_runs(dht: DhtNode) -> list[Run]:
    """The runs that other nodes know, the largest first; at most :data:`MAX_RUNS`."""
    run_ids = (await find_run_ids(dht))[:MAX_RUNS]
    runs = await asyncio.gather(*(look_up_run(dht, run_id) for run_id in run_ids))
    return sorted(runs, key=lambda run: -len(run.peers))


def nobody_is_in(run_id: str, num_joined: int, runs: Sequence[Run]) -> str:
    """What to tell somebody whose run nobody else knows: most often its name was mistyped."""
    here = f"runs here: {', '.join(map(str, runs))}" if runs else "they know of no run"
    return f"joined {counted(num_joined, 'peer')}; none of them is in run {run_id!r}; {here}"


def _is_run_id(topic: str) -> bool:
    try:
        checked_run_id(topic)
    except ConfigError:
        return False
    return True
