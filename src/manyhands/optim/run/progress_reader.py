"""The progress records of the other peers as one peer reads them, and what they say together of one position.

A record says what its peer had when it was published. Some things a peer learns sooner: it sees a round take the
members to the next position, and near the target the others tell it directly what they have. Records that were
published before that do not count any more.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from manyhands.averaging.messages import NUM_RECENT_STEPS, Position
from manyhands.averaging.peer_records import RecordReader, SeenRecord
from manyhands.base.identity import PeerId
from manyhands.dht import DhtNode, Schema, StoredValue
from manyhands.optim.run.partition_detector import PartitionDetector
from manyhands.optim.run.progress import MAX_TTL_S, ProgressRecord, Reckoning, busy_until
from manyhands.optim.run.twin import Twin
from manyhands.rpc import Endpoint

PROGRESS = Schema(ProgressRecord | Literal["goodbye"], is_owned=True, max_ttl_s=MAX_TTL_S)
"""What peers publish of their progress."""

IN_FLIGHT_S = 1.0
"""What a record may take from its owner to its reader."""


def progress_key(run_id: str) -> str:
    """The DHT key of a run's progress records."""
    return f"{run_id}.progress"


class Observed(SeenRecord[ProgressRecord], frozen=True, gc=False):
    """A record of another peer.

    Attributes:
        reckoning: how its samples must grow from here.
        said: the position that it has named itself; what it said else is of then.
        moved_at: when a round was seen to take the peer to this position (loop time); earlier records are out of date.
        heard_at: when the peer said this directly (loop time), if it did; likewise.
    """

    reckoning: Reckoning
    said: Position
    moved_at: float = -math.inf
    heard_at: float = -math.inf

    def is_outdated_by(self, record: ProgressRecord, issued_at: float) -> bool:
        """Whether ``record`` is news; not when the peer published it before it was moved, or before it said more."""
        if record.position == self.record.position and record.samples < self.record.samples:
            return issued_at > self.heard_at + IN_FLIGHT_S
        return record.position.step >= self.record.position.step or issued_at > self.moved_at + IN_FLIGHT_S


class ProgressReader(RecordReader[ProgressRecord, Observed]):
    """The progress records of a run, as last read; enough for a peer that only watches.

    Attributes:
        twin: of a peer that publishes: looks at the records under its own id.
    """

    def __init__(self, endpoint: Endpoint, dht: DhtNode, run_id: str) -> None:
        super().__init__(endpoint, dht, progress_key(run_id), PROGRESS)
        self.twin: Twin | None = None
        self._company = PartitionDetector()
        self._step = 0  # where this peer is
        self._met: tuple[Position, list[bytes]] | None = None  # from where it makes a step, and in which rounds
        self._loaded: tuple[Position, Sequence[bytes]] | None = None  # a state, and the rounds behind it
        self._strangers: tuple[int, Mapping[PeerId, bytes]] = (-1, {})  # and of which version

    def _seen_as(
        self, known: Observed | None, record: ProgressRecord, stored: StoredValue, now: float
    ) -> Observed | None:
        issued_at = now + stored.remaining_s - record.ttl_s
        if known is not None and not known.is_outdated_by(record, issued_at):
            return None
        remaining_s = min(stored.remaining_s, record.ttl_s)
        reckoning = Reckoning.of(record, now + remaining_s - record.ttl_s)
        return Observed(record, stored.sequence, now + remaining_s, reckoning, record.position)

    def _look_at_own(self, record: ProgressRecord, stored: StoredValue, now: float) -> None:
        if self.twin is not None:
            self.twin.seen(record.began_at, now + min(stored.remaining_s - record.ttl_s, 0.0), now)

    def heard(self, peer_id: PeerId, record: ProgressRecord) -> None:
        """A peer has told directly what it would publish now."""
        now, known = asyncio.get_running_loop().time(), self._seen.get(peer_id)
        sequence = known.sequence if known is not None else -1
        until = now + min(record.ttl_s, MAX_TTL_S)
        self._keep(peer_id, Observed(record, sequence, until, Reckoning.of(record, now), record.position, heard_at=now))

    def moved(self, peer_ids: Iterable[PeerId], position: Position, lineage_samples: int) -> None:
        """These peers are known to have gone to ``position``, unless they said so or more; holds until they do."""
        now = asyncio.get_running_loop().time()
        for peer_id in peer_ids:
            seen = self._seen.get(peer_id)
            if seen is not None and seen.record.position.step < position.step:
                record = msgspec.structs.replace(
                    seen.record, position=position, samples=0, lineage_samples=lineage_samples, counted_s_ago=0.0
                )
                assumed = Observed(
                    record, seen.sequence, seen.expires_at, Reckoning.of(record, now), seen.said, moved_at=now
                )
                self._keep(peer_id, assumed)

    def records(self) -> dict[PeerId, ProgressRecord]:
        """What the other peers say of themselves."""
        return {peer_id: seen.record for peer_id, seen in self.observed().items()}

    def trainers(self) -> dict[PeerId, ProgressRecord]:
        """The records of the peers that train, wherever in the run they are."""
        return {peer_id: record for peer_id, record in self.records().items() if not record.is_auxiliary}

    def reckoned_samples(self) -> dict[PeerId, int]:
        """The samples that the other peers must have by now."""
        now = asyncio.get_running_loop().time()
        return {peer_id: int(seen.reckoning.at(now)) for peer_id, seen in self.observed().items()}

    def is_stranded(self) -> bool:
        """Whether others train, and nobody can be dialled."""
        observed = self.observed().values()
        return all(seen.record.is_client for seen in observed) and any(
            not seen.record.is_auxiliary for seen in observed
        )

    # parts of a grid

    @property
    def recent_rounds(self) -> list[bytes]:
        """Of the steps that this peer has made in a grid."""
        return self._company.recent_rounds

    def met(self, here: Position, fingerprints: Iterable[bytes]) -> None:
        """This peer makes a step in a grid from ``here``; it counts once :meth:`moves` follows.

        Args:
            fingerprints: see :meth:`manyhands.optim.run.partition_detector.PartitionDetector.met`.
        """
        self._met, self._loaded = (here, list(fingerprints)), None

    def loaded(self, position: Position, recent_rounds: Sequence[bytes]) -> None:
        """A state has come from another peer, with the rounds behind it; :meth:`moves` follows if it can be used."""
        self._met, self._loaded = None, (position, recent_rounds)

    def moves(self, here: Position, position: Position) -> None:
        """This peer goes to ``position``: by the step that it just made, with a state that was loaded, or otherwise."""
        if self._loaded is not None and self._loaded[0] == position:
            self._company.follow(self._loaded[1])
        elif position == here:
            return
        elif self._met is not None and self._met[0] == here and position.step == here.step + 1:
            self._company.met(self._met[1])
        else:
            self._company.follow([])  # all who are at the new position have come the same way
        self._met = self._loaded = None
        self._step = position.step
        self._note_change()

    def strangers(self) -> Mapping[PeerId, bytes]:
        """In a grid, the peers that have made their last steps without this peer's part of it, and in which part."""
        version = self.version
        if self._strangers[0] != version:
            self._strangers = (version, self._company.strangers(self._published_rounds()))
        return self._strangers[1]

    def is_stranger(self, peer_id: PeerId, recent_rounds: Sequence[bytes]) -> bool:
        """Whether a peer at this peer's step is one, by what it says of its last steps now; its record may be late."""
        return peer_id in self._company.strangers({**self._published_rounds(), peer_id: recent_rounds})

    def _published_rounds(self) -> dict[PeerId, Sequence[bytes]]:
        """What the others have published of their last steps, if these are about this peer's."""
        return {
            peer_id: seen.record.recent_rounds
            for peer_id, seen in self.observed().items()
            if abs(seen.said.step - self._step) < NUM_RECENT_STEPS
        }


class View:
    """What the records of the others say of one position. It does not change; another record makes another view.

    Args:
        observed: the records of all other peers.
        left_out: peers that do not count at the position: strangers.
        missing: peers at the position that came to no round since their last record. They count, but are not expected.

    Attributes:
        trainers: the records of those at the position that train.
        helpers: the records of the auxiliary peers there.
        samples: of all trainers together, as they have said.
        samples_per_second: likewise.
        hosts: the trainers that can be dialled, the one that leads first.
    """

    def __init__(
        self,
        observed: Mapping[PeerId, Observed],
        position: Position,
        left_out: Container[PeerId] = (),
        missing: Container[PeerId] = (),
    ) -> None:
        here = {peer_id: seen for peer_id, seen in observed.items()
                if seen.record.position == position and peer_id not in left_out}  # fmt: skip
        self.observed = observed
        self.trainers = {peer_id: seen for peer_id, seen in here.items() if not seen.record.is_auxiliary}
        self.helpers = {peer_id: seen for peer_id, seen in here.items() if seen.record.is_auxiliary}
        records = [seen.record for seen in self.trainers.values()]
        self.samples = sum([record.samples for record in records])
        self.samples_per_second = sum([record.samples_per_second for record in records])
        self.hosts = sorted([peer_id for peer_id, seen in self.trainers.items() if not seen.record.is_client])
        self.longest_batch_s = max([record.batch_s for record in records], default=0.0)
        self._awaited = {peer_id: seen for peer_id, seen in self.trainers.items() if peer_id not in missing}
        self._awaited_helpers = {peer_id: seen for peer_id, seen in self.helpers.items() if peer_id not in missing}

    @cached_property
    def reachable(self) -> Mapping[PeerId, Observed]:
        """Trainers and auxiliary peers that came to a round or were not needed in one."""
        return {**self._awaited, **self._awaited_helpers}

    def expected(self, *, with_helpers: bool) -> Mapping[PeerId, bool]:
        """The peers that should come to the next round, and whether each is in client mode.

        Args:
            with_helpers: auxiliary peers too, if no trainer can be dialled.
        """
        return self._expected_with_helpers if with_helpers and not self.hosts else self._expected_trainers

    @cached_property
    def _expected_trainers(self) -> Mapping[PeerId, bool]:
        return {peer_id: seen.record.is_client for peer_id, seen in self._awaited.items()}

    @cached_property
    def _expected_with_helpers(self) -> Mapping[PeerId, bool]:
        return {peer_id: seen.record.is_client for peer_id, seen in self.reachable.items()}

    # as time goes on

    def reckoned_samples(self, now: float) -> int:
        """What all trainers together must have by now."""
        return int(sum([seen.reckoning.at(now) for seen in self.trainers.values()]))

    def arriving_samples(self, now: float) -> int:
        """What the trainers that are not missing bring if each finishes its batch and begins no other one."""
        return sum(seen.reckoning.with_batch_at(now, seen.record.batch_s) for seen in self._awaited.values())

    def busy_until(self, instant: float) -> float:
        """When the last of them must have finished the batch that it computes at an instant."""
        ends = [busy_until(seen.record, seen.reckoning, instant) for seen in self._awaited.values()]
        return max(ends, default=instant)
