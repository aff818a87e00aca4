"""Reads the progress records of the other peers, and combines those of one position.

A record describes its peer at publication. Some things a peer learns sooner: a round takes its members to the next
position, and near the target the others send it their progress directly. Records from before that no longer count.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Container, Iterable, Mapping
from typing import Literal

import msgspec

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import RecordReader, SeenRecord
from manyhands.base.identity import PeerId
from manyhands.base.twin import Twin
from manyhands.dht import DhtNode, Schema, StoredValue
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


class Observed(SeenRecord[ProgressRecord], frozen=True, gc=False):
    """A record of another peer.

    Attributes:
        since: when it was published (loop time).
        said: the position that the peer itself has published; the rest of its record belongs to that.
        learnt_at: when this was learnt directly (loop time), from a round or from the peer itself; -inf otherwise.
    """

    since: float
    said: Position
    learnt_at: float = -math.inf


class ProgressReader(RecordReader[ProgressRecord, Observed]):
    """The progress records of a run, as last read; sufficient for a peer that only watches.

    Attributes:
        twin: checks records under this peer's own id; None for a peer that does not publish.
    """

    def __init__(self, endpoint: Endpoint, dht: DhtNode, run_id: str) -> None:
        super().__init__(endpoint, dht, progress_key(run_id), PROGRESS)
        self.twin: Twin | None = None

    def _seen_as(
        self, known: Observed | None, record: ProgressRecord, stored: StoredValue, now: float
    ) -> Observed | None:
        issued_at = now + stored.remaining_s - record.ttl_s
        if known is not None and issued_at <= known.learnt_at + IN_FLIGHT_S:
            here, there = known.record.position, record.position
            if record.samples < known.record.samples if here == there else there.step < here.step:
                return None  # it says less than what was learnt directly since
        remaining_s = min(stored.remaining_s, record.ttl_s)
        since = now + remaining_s - record.ttl_s
        return Observed(record, stored.sequence, now + remaining_s, since, record.position)

    def _look_at_own(self, record: ProgressRecord, stored: StoredValue, now: float) -> None:
        if self.twin is not None:
            self.twin.seen(record.began_at, now + min(stored.remaining_s - record.ttl_s, 0.0), now)

    def heard(self, peer_id: PeerId, record: ProgressRecord) -> None:
        """Take over the progress that a peer has sent directly."""
        now, known = asyncio.get_running_loop().time(), self._seen.get(peer_id)
        sequence, until = -1 if known is None else known.sequence, now + min(record.ttl_s, MAX_TTL_S)
        self._keep(peer_id, Observed(record, sequence, until, now, record.position, now))

    def moved(self, peer_ids: Iterable[PeerId], position: Position, lineage_samples: int) -> None:
        """Assume that these peers are at ``position``, until their own records say so or more."""
        now = asyncio.get_running_loop().time()
        for peer_id in peer_ids:
            seen = self._seen.get(peer_id)
            if seen is not None and seen.record.position.step < position.step:
                record = msgspec.structs.replace(
                    seen.record, position=position, samples=0, lineage_samples=lineage_samples, counted_s_ago=0.0
                )
                self._keep(peer_id, Observed(record, seen.sequence, seen.expires_at, now, seen.said, now))

    def records(self) -> dict[PeerId, ProgressRecord]:
        """The latest records of the other peers."""
        return {peer_id: seen.record for peer_id, seen in self.observed().items()}

    def trainers(self) -> dict[PeerId, ProgressRecord]:
        """The records of the peers that train, wherever in the run they are."""
        return {peer_id: record for peer_id, record in self.records().items() if not record.is_auxiliary}

    def is_stranded(self) -> bool:
        """Whether others train, and no peer can be dialled."""
        return bool(self.trainers()) and all(record.is_client for record in self.records().values())

    def note_move(self) -> None:
        """This peer is at another position, so that what it concludes from the records changes."""
        self._note_change()


class View:
    """The other peers at one position, as last read. Immutable: any news gives another view.

    Args:
        observed: the records of all other peers.
        missing: peers that came to no round since their last record. They count, but are not expected.
        needs_host: auxiliary peers are expected too, if no trainer can be dialled.

    Attributes:
        trainers: records of the peers that train at the position.
        longest_batch_s: of the trainers that have published it.
        reachable: the peers at the position, auxiliary ones too, that are not missing.
        awaited: records of the trainers that are not missing.
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
        self.longest_batch_s = max([seen.record.batch_s for seen in self.trainers.values()], default=0.0)
        self.reachable = [peer_id for peer_id in here if peer_id not in missing]
        self.awaited = {peer_id: seen for peer_id, seen in self.trainers.items() if peer_id not in missing}
        hosts = [peer_id for peer_id, seen in self.trainers.items() if not seen.record.is_client]
        expected = self.reachable if needs_host and not hosts else self.awaited
        self.expected = {peer_id: here[peer_id].record.is_client for peer_id in expected}
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
