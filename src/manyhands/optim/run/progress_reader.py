"""Reads the progress records of the other peers, and combines those of one position.

A record describes its peer at publication. Some things a peer learns sooner: a round takes its members to the next
position, and near the target the others send it their progress directly. Records from before that no longer count.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Container, Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecords, SeenRecord
from manyhands.base.identity import PeerId
from manyhands.dht import DhtNode, Schema
from manyhands.optim.run.progress import MAX_TTL_S, Progress, ProgressRecord, busy_s, reckoned_samples
from manyhands.rpc import Endpoint

logger = logging.getLogger(__name__)

PROGRESS = Schema(ProgressRecord | Literal["goodbye"], is_owned=True, max_ttl_s=MAX_TTL_S)
"""The progress records that peers publish."""

IN_FLIGHT_S = 1.0
"""How long a record may travel from its owner to its reader."""


def progress_key(run_id: str) -> str:
    """The DHT key of a run's progress records."""
    return f"{run_id}.progress"


Observed: TypeAlias = SeenRecord[ProgressRecord]


def gone_to(seen: Observed, position: Position, lineage_samples: int, now: float) -> Observed:
    """The record of a peer that has just gone to a position, by what others know of it."""
    record = msgspec.structs.replace(
        seen.record, position=position, samples=0, lineage_samples=lineage_samples, counted_s_ago=0.0,
        ttl_s=max(seen.expires_at - now, 0.0),
    )  # fmt: skip
    return SeenRecord(record, seen.expires_at, is_direct=True)


class ProgressReader(PeerRecords[ProgressRecord]):
    """The progress records of a run, as last read; sufficient for a peer that only watches."""

    def __init__(self, endpoint: Endpoint, dht: DhtNode, run_id: str, min_period_s: float = 0.0) -> None:
        super().__init__(endpoint, dht, progress_key(run_id), PROGRESS, min_period_s)

    def _is_outdated(self, known: Observed, news: Observed) -> bool:
        here, there = known.record.position, news.record.position
        says_less = news.record.samples < known.record.samples if here == there else there.step < here.step
        return says_less and known.is_direct and news.since <= known.since + IN_FLIGHT_S

    def heard(self, peer_id: PeerId, record: ProgressRecord) -> None:
        """Take over the progress that a peer has sent directly."""
        record = msgspec.structs.replace(record, ttl_s=min(record.ttl_s, MAX_TTL_S))
        self._keep(peer_id, SeenRecord(record, asyncio.get_running_loop().time() + record.ttl_s, is_direct=True))

    def moved(self, peer_ids: Iterable[PeerId], position: Position, lineage_samples: int) -> None:
        """Assume that these peers are at ``position``, until their own records say so or more."""
        now = asyncio.get_running_loop().time()
        for peer_id in peer_ids:
            self._missing.pop(peer_id, None)
            seen = self._seen.get(peer_id)
            if seen is not None and seen.record.position.step < position.step:
                self._keep(peer_id, gone_to(seen, position, lineage_samples, now))

    def records(self) -> dict[PeerId, ProgressRecord]:
        """The latest records of the other peers."""
        return {peer_id: seen.record for peer_id, seen in self.observed().items()}

    def trainers(self) -> dict[PeerId, ProgressRecord]:
        """The records of the peers that train, wherever in the run they are."""
        return {peer_id: record for peer_id, record in self.records().items() if not record.is_auxiliary}

    def is_stranded(self) -> bool:
        """Whether others train, and no peer can be dialled."""
        return bool(self.trainers()) and all(record.is_client for record in self.records().values())


class View:
    """The other peers at one position, as last read. Immutable: any news gives another view.

    Args:
        observed: the records of all other peers.
        missing: peers that came to no round since their last record. They count, but are not expected.
        needs_host: auxiliary peers are expected too, if no trainer can be dialled.

    Attributes:
        trainers: records of the peers that train at the position; of these ``awaited`` are not missing.
        reachable: the peers that are not missing, with auxiliary ones.
        expected: the peers that should come to the next round, and whether each is in client mode.
    """

    def __init__(
        self,
        observed: Mapping[PeerId, Observed],
        position: Position,
        missing: Container[PeerId] = (),
        *,
        needs_host: bool = False,
    ) -> None:
        here = {peer_id: seen for peer_id, seen in observed.items() if seen.record.position == position}
        self.observed = observed
        self.trainers = {peer_id: seen for peer_id, seen in here.items() if not seen.record.is_auxiliary}
        self.awaited = {peer_id: seen for peer_id, seen in self.trainers.items() if peer_id not in missing}
        self.reachable = [peer_id for peer_id in here if peer_id not in missing]
        takes_all = needs_host and all(seen.record.is_client for seen in self.trainers.values())
        self.expected = {peer: here[peer].record.is_client for peer in (self.reachable if takes_all else self.awaited)}
        self._samples = sum([seen.record.samples for seen in self.trainers.values()])
        self._speed = sum([seen.record.samples_per_second for seen in self.trainers.values()])

    def progress(self, own: ProgressRecord | None, target_batch_size: int, now: float | None = None) -> Progress:
        """The progress of all trainers together, with this peer if it trains; ``own`` is None if it only watches.

        Args:
            now: predict the samples of the others for this instant, up to the target; by default those that they have
                published count.
        """
        num_peers, speed, samples, more = len(self.trainers), self._speed, self._samples, 0
        if now is not None:
            predicted = [reckoned_samples(seen.record, now - seen.since) for seen in self.trainers.values()]
            more = int(sum(predicted)) - samples
        if own is not None and not own.is_auxiliary:
            num_peers, samples, speed = num_peers + 1, samples + own.samples, speed + own.samples_per_second
        samples += max(min(more, target_batch_size - samples), 0)  # peers that wait for others compute no more
        missing = max(target_batch_size - samples, 0)
        eta_s = 0.0 if missing == 0 else missing / speed if speed > 0 else math.inf
        return Progress(samples, num_peers, speed, eta_s)

    def busy_until(self, instant: float) -> float:
        """The predicted end of the last batch that one of them computes at an instant."""
        busy = [busy_s(seen.record, instant - seen.since) for seen in self.awaited.values()]
        return instant + max(busy, default=0.0)
