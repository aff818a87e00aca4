"""The progress records of the other peers, as one peer reads them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from manyhands.averaging.messages import NUM_RECENT_STEPS, Position, readable_addresses
from manyhands.base.identity import PeerId
from manyhands.dht import DhtNode, Schema, StoredValue
from manyhands.optim.run.crowd import Crowd
from manyhands.optim.run.partition_detector import PartitionDetector
from manyhands.optim.run.progress import MAX_TTL_S, ProgressRecord, Reckoning
from manyhands.optim.run.twin import Twin
from manyhands.rpc import Endpoint

logger = logging.getLogger(__name__)

GOODBYE = "goodbye"
"""Published instead of a record by a peer that leaves on purpose."""

PROGRESS = Schema(ProgressRecord | Literal["goodbye"], is_owned=True, max_ttl_s=MAX_TTL_S)
"""What peers publish of their progress."""

IN_FLIGHT_S = 1.0
"""What a record may take from its owner to its reader."""


def progress_key(run_id: str) -> str:
    """The DHT key of a run's progress records."""
    return f"{run_id}.progress"


class Observed(msgspec.Struct, frozen=True, gc=False):
    """A record of another peer.

    Attributes:
        expires_at: until when it counts (loop time).
        reckoning: how its samples must grow from here.
        said: the position that it has named itself; what it said else is of then.
        moved_at: when a round was seen to take the peer to this position (loop time); earlier records are out of date.
        heard_at: when the peer said this directly (loop time), if it did; likewise.
    """

    record: ProgressRecord
    sequence: int
    expires_at: float
    reckoning: Reckoning
    said: Position
    moved_at: float = -math.inf
    heard_at: float = -math.inf

    def is_outdated_by(self, record: ProgressRecord, issued_at: float) -> bool:
        """Whether ``record`` is news; not when the peer published it before it was moved, or before it said more."""
        if record.position == self.record.position and record.samples < self.record.samples:
            return issued_at > self.heard_at + IN_FLIGHT_S
        return record.position.step >= self.record.position.step or issued_at > self.moved_at + IN_FLIGHT_S


class ProgressReader:
    """The progress records of a run, as last read; enough for who only watches.

    Attributes:
        version: changes whenever a record comes, changes or goes, or who belongs together.
    """

    def __init__(self, endpoint: Endpoint, dht: DhtNode, run_id: str) -> None:
        self._endpoint = endpoint
        self._dht = dht
        self._key = progress_key(run_id)
        self.version = 0
        self._observed: dict[PeerId, Observed] = {}
        self._first_expiry = math.inf
        self._crowd: Crowd | None = None
        self._crowd_of: tuple[Position, int] | None = None
        self._here: Mapping[PeerId, Observed] = {}
        self._helpers: Mapping[PeerId, Observed] = {}
        self._here_of: tuple[Position, int] | None = None
        self._sequences: dict[str, int] = {}  # by peer id
        self._company = PartitionDetector()
        self._step = 0  # where this peer is
        self._met: tuple[Position, list[bytes]] | None = None  # from where it makes a step, and in which rounds
        self._loaded: tuple[Position, Sequence[bytes]] | None = None  # a state, and the rounds behind it
        self._strangers: Mapping[PeerId, bytes] = {}
        self._strangers_of = -1
        self.twin: Twin | None = None  # of a peer that publishes

    async def refresh(self, *, quickly: bool = False) -> None:
        """Read the records of all peers.

        Args:
            quickly: from one holder, which may have missed some; what was read of these before counts.
        Raises:
            Unavailable: the DHT does not answer; what was read before counts until it expires.
        """
        answer = await self._dht.get(self._key, quickly=quickly)
        now = asyncio.get_running_loop().time()
        sequences, own_id, num_shown = self._sequences, self._endpoint.peer_id, 0
        for subkey, stored in answer.items():
            if stored.owner == subkey == own_id and self.twin is not None:
                self._look_at_own(stored, self.twin, now)
            elif stored.owner == subkey != own_id:
                num_shown += 1
                if stored.sequence > sequences.get(subkey, -1):
                    self._take_in(PeerId(subkey), stored, now)
        if len(sequences) > num_shown:  # not all of them were shown
            current = answer.keys() | self.observed().keys()
            self._sequences = {peer_id: sequence for peer_id, sequence in sequences.items() if peer_id in current}

    def _look_at_own(self, stored: StoredValue, twin: Twin, now: float) -> None:
        with contextlib.suppress(msgspec.ValidationError):
            record = PROGRESS.decode(stored.raw)
            if record != GOODBYE:
                twin.seen(record.began_at, now + min(stored.remaining_s - record.ttl_s, 0.0), now)

    def _take_in(self, peer_id: PeerId, stored: StoredValue, now: float) -> None:
        self._sequences[peer_id] = stored.sequence
        try:
            record = PROGRESS.decode(stored.raw)
        except msgspec.ValidationError as error:
            self._endpoint.counters["bad_records"] += 1
            logger.warning("the progress record of peer %s cannot be read: %s", peer_id, error)
            return
        if record == GOODBYE:  # however it was encoded
            self._observed.pop(peer_id, None)
            self.version += 1
            return
        known, ttl_s, remaining_s = self._observed.get(peer_id), record.ttl_s, stored.remaining_s
        if known is None or known.is_outdated_by(record, now + remaining_s - ttl_s):
            if remaining_s > ttl_s:
                remaining_s = ttl_s
            reckoning = Reckoning.of(record, now + remaining_s - ttl_s)
            self._observe(peer_id, Observed(record, stored.sequence, now + remaining_s, reckoning, record.position))
            if known is None or known.record.addresses != record.addresses:
                self._endpoint.learn(peer_id, readable_addresses(record.addresses))

    def heard(self, peer_id: PeerId, record: ProgressRecord) -> None:
        """A peer has told directly what it would publish now."""
        now, known = asyncio.get_running_loop().time(), self._observed.get(peer_id)
        reckoning = Reckoning.of(record, now)
        sequence = known.sequence if known is not None else -1
        self._observe(
            peer_id,
            Observed(record, sequence, now + min(record.ttl_s, MAX_TTL_S), reckoning, record.position, heard_at=now),
        )

    def _observe(self, peer_id: PeerId, seen: Observed) -> None:
        self._observed[peer_id] = seen
        self._first_expiry = min(self._first_expiry, seen.expires_at)
        self.version += 1

    def forget(self, peer_id: PeerId, sequence: int) -> None:
        """What a peer has said so far, up to this record, does not count any more."""
        seen = self._observed.get(peer_id)
        if seen is not None and seen.sequence <= sequence:
            del self._observed[peer_id]
            self.version += 1

    def observed(self) -> Mapping[PeerId, Observed]:
        """The records of the other peers that still count."""
        now = asyncio.get_running_loop().time()
        if now >= self._first_expiry:
            num_before = len(self._observed)
            self._observed = {peer_id: seen for peer_id, seen in self._observed.items() if seen.expires_at > now}
            self._first_expiry = min((seen.expires_at for seen in self._observed.values()), default=math.inf)
            self.version += len(self._observed) != num_before
        return self._observed

    def records(self) -> dict[PeerId, ProgressRecord]:
        """What the other peers say of themselves."""
        return {peer_id: seen.record for peer_id, seen in self.observed().items()}

    def reckoned_samples(self) -> dict[PeerId, int]:
        """The samples that they must have by now."""
        now = asyncio.get_running_loop().time()
        return {peer_id: seen.reckoning.at(now) for peer_id, seen in self.observed().items()}

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
        self.version += 1

    def strangers(self) -> Mapping[PeerId, bytes]:
        """In a grid, those who have made their last steps without this peer's part of it, and in which part."""
        observed = self.observed()
        if self._strangers_of != self.version:
            self._strangers = self._company.strangers(self._said_of(observed))
            self._strangers_of = self.version
        return self._strangers

    def is_stranger(self, peer_id: PeerId, recent_rounds: Sequence[bytes]) -> bool:
        """Whether a peer at this peer's step is one, by what it says of its last steps now; its record may be late."""
        return peer_id in self._company.strangers({**self._said_of(self.observed()), peer_id: recent_rounds})

    def _said_of(self, observed: Mapping[PeerId, Observed]) -> dict[PeerId, Sequence[bytes]]:
        """What they have published of their last steps, if these are about this peer's."""
        return {
            peer_id: seen.record.recent_rounds
            for peer_id, seen in observed.items()
            if abs(seen.said.step - self._step) < NUM_RECENT_STEPS
        }

    def here(self, position: Position) -> Mapping[PeerId, Observed]:
        """The records of those who train at a position, but for strangers; looked for once, however often one asks."""
        observed, strangers = self.observed(), self.strangers()
        if self._here_of != (position, self.version):
            at_position = {
                peer_id: seen
                for peer_id, seen in observed.items()
                if seen.record.position == position and peer_id not in strangers
            }
            self._here = {peer_id: seen for peer_id, seen in at_position.items() if not seen.record.is_auxiliary}
            self._helpers = {peer_id: seen for peer_id, seen in at_position.items() if seen.record.is_auxiliary}
            self._here_of = (position, self.version)
        return self._here

    def helpers(self, position: Position) -> Mapping[PeerId, Observed]:
        """The records of the auxiliary peers at a position."""
        self.here(position)
        return self._helpers

    def trainers(self) -> dict[PeerId, ProgressRecord]:
        """The records of the peers that train, wherever in the run they are."""
        return {peer_id: record for peer_id, record in self.records().items() if not record.is_auxiliary}

    def is_stranded(self) -> bool:
        """Whether others train, and nobody can be dialled."""
        observed = self.observed().values()
        return all(seen.record.is_client for seen in observed) and any(
            not seen.record.is_auxiliary for seen in observed
        )

    def can_be_asked(self, peer_id: PeerId) -> None:
        """A peer in client mode has called on this one: it can be asked for its state."""
        if peer_id in self._observed:
            self.version += 1

    def at(self, position: Position) -> Crowd:
        """Those at a position, summed up."""
        here = self.here(position)
        if self._crowd is None or self._crowd_of != self._here_of:
            self._crowd = Crowd({peer_id: (seen.record, seen.reckoning) for peer_id, seen in here.items()})
            self._crowd_of = self._here_of
        return self._crowd

    def moved(self, peer_ids: list[PeerId], position: Position, lineage_samples: int) -> None:
        """These peers are known to have gone to ``position``, unless they said so or more; holds until they do."""
        now = asyncio.get_running_loop().time()
        for peer_id in peer_ids:
            seen = self._observed.get(peer_id)
            if seen is not None and seen.record.position.step < position.step:
                record = msgspec.structs.replace(
                    seen.record, position=position, samples=0, lineage_samples=lineage_samples, counted_s_ago=0.0
                )
                reckoning = Reckoning.of(record, now)
                assumed = Observed(record, seen.sequence, seen.expires_at, reckoning, seen.said, now)
                self._observe(peer_id, assumed)
