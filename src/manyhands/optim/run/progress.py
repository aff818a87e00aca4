"""The progress of the collaboration, from the DHT records of its peers (:mod:`manyhands.averaging.peer_records`).

A record says how many samples its peer had, when, and how fast it computes; a later reader extrapolates from it. So far
from the target a peer publishes only what the others could not have predicted. Predictions only decide when to publish
and to read: a global step is due when the samples that peers have *published* reach the target, and near it each peer
publishes at once. A round, and what peers send each other directly, replaces records from before.

In a crowd, above ``CROWD`` peers, records live longer and are read less often, by up to ``MAX_CROWD_FACTOR``, so a peer
reads about as many records a minute at any size of the run. At the target the leader alone reads; it calls the others.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import (
    KEEP_ALIVES,
    PROGRESS_KIND,
    PeerRecord,
    PeerRecords,
    SeenRecord,
)
from manyhands.averaging.timing import DAY_S, LATE_ANSWER_S, LOG_S, MINUTE_S
from manyhands.base.identity import PeerId
from manyhands.base.text import counted, shell_option
from manyhands.dht import DhtNode
from manyhands.optim.config import ProgressConfig
from manyhands.rpc import Endpoint

logger = logging.getLogger(__name__)

SHOWN_LIVE = {"is_shown_live": True}
"""``extra`` of log lines whose content a live view always shows, so that it can leave them out."""
NEWS_SHARE = 0.1
"""Share of a peer's part of the target by which the others may be wrong about its samples."""
NEWS_SPEED = 0.2
"""Relative error of its speed."""
LOOKS_AHEAD = 16
"""Instants for which it is predicted what the others will have."""
CROWD = 40
MAX_CROWD_FACTOR = 6.0
MAX_COUNT = 2**53
MAX_SPEED = 1e9
"""The most samples per second that are believed: sums of strangers' numbers stay exact."""


class Claim(enum.IntEnum):
    """Why a run should begin from the parameters of a peer at step 0; the highest claim wins."""

    NEWCOMER = 0  # it has joined, and has not loaded the parameters of the others; or it does not train
    JOINED = 1  # when it joined, another peer had signed the settings of the run, and none was there to load from
    BEGAN = 2  # it was the first to sign the settings of the run, or has loaded the parameters of that peer
    TOLD = 3  # its user says that its parameters are those of the run, or it has loaded the parameters of that peer


@dataclass(frozen=True)
class Progress:
    """Progress of the peers at one position, all together, towards the next global step.

    Attributes:
        eta_s: seconds until the target at that speed; infinite if no peer computes.
    """

    samples: int
    num_peers: int
    samples_per_second: float
    eta_s: float


def reckoned_samples(record: PeerRecord, age_s: float) -> float:
    """The samples that a peer has if it goes on at its published speed, ``age_s`` seconds after it has published."""
    samples = record.samples + min(record.samples_per_second, MAX_SPEED) * _since_count_s(record, age_s)
    return min(MAX_COUNT, samples)


def samples_in(record: PeerRecord, age_s: float, ahead_s: float) -> int:
    """The predicted samples of a peer when it has computed for ``ahead_s`` more; those counted if its pace is unknown.

    Args:
        age_s: seconds since it has published the record.
    """
    if (batch_s := record.batch_s) <= 0:
        return record.samples
    num_batches = (_since_count_s(record, age_s) + ahead_s) // batch_s
    more = min(record.samples_per_second, MAX_SPEED) * batch_s * num_batches
    return min(record.samples + round(min(more, MAX_COUNT)), MAX_COUNT)


def _since_count_s(record: PeerRecord, age_s: float) -> float:
    """Seconds since a peer counted its samples, as far as its record is relied on."""
    ttl_s = min(record.ttl_s, DAY_S)  # whatever a stranger says, products are numbers
    return min(max(age_s, 0.0), ttl_s / KEEP_ALIVES) + min(record.counted_s_ago, ttl_s)


def busy_s(record: PeerRecord, age_s: float) -> float:
    """Predicted seconds until the end of a peer's batch; 0 if unknown, or if it has counted nothing for two batches."""
    elapsed_s = age_s + min(record.counted_s_ago, DAY_S)
    return record.batch_s - elapsed_s % record.batch_s if 0 <= elapsed_s < 2 * record.batch_s else 0.0


def crowd_factor(num_peers: int) -> float:
    """The factor for lifetimes and read periods of records in a crowd; 1 with few peers."""
    return min(max(num_peers / CROWD, 1.0), MAX_CROWD_FACTOR)


def is_news(
    published: PeerRecord, age_s: float, own: PeerRecord, target_batch_size: int, num_peers: int, is_near: bool
) -> bool:
    """Whether a peer must publish ``own``, as the others could not have predicted it from the record ``published``.

    Args:
        is_near: the target may be reached before this peer's next batch; then exact numbers count.
    """
    is_moved = (own.position, own.seat, own.sketch) != (published.position, published.seat, published.sketch)
    if is_moved or (is_near and own.samples != published.samples):
        return True
    if abs(own.samples_per_second - published.samples_per_second) > NEWS_SPEED * published.samples_per_second:
        return True
    share = target_batch_size / max(num_peers, 1)
    return abs(reckoned_samples(published, age_s) - own.samples) > NEWS_SHARE * share


def next_refresh_s(progress: Progress, config: ProgressConfig) -> float:
    """When to read the records again: before the predicted target, by the drift that newcomers may cause."""
    num_peers = progress.num_peers
    drift = max(num_peers + config.expected_drift_peers, num_peers * (1 + config.expected_drift_rate))
    predicted_s = progress.eta_s * num_peers / drift if math.isfinite(progress.eta_s) else config.default_refresh_s
    return min(max(predicted_s, config.min_refresh_s), config.max_refresh_s * crowd_factor(num_peers))


def sum_of_samples(numbers: Iterable[float]) -> int:
    """Sum of numbers of samples, at most as many as a record can hold."""
    return round(min(math.fsum(numbers), MAX_COUNT))


def branch_order(record: PeerRecord) -> tuple[int, int, int, bytes]:
    """Orders the branches of a run: the higher one wins."""
    claim = record.claim if record.position.step == 0 else 0
    return (record.position.step, claim, record.lineage_samples, record.position.lineage)


def gone_to(seen: SeenRecord, position: Position, lineage_samples: int, now: float) -> SeenRecord:
    """The record of a peer that has just gone to a position, by what others know of it."""
    record = msgspec.structs.replace(
        seen.record, position=position, samples=0, lineage_samples=lineage_samples, counted_s_ago=0.0,
        ttl_s=max(seen.expires_at - now, 0.0),
    )  # fmt: skip
    return SeenRecord(record, seen.expires_at, is_direct=True)


class ProgressReader(PeerRecords):
    """The progress records of a run; sufficient for a peer that only watches."""

    def __init__(self, endpoint: Endpoint, dht: DhtNode, run_id: str, min_period_s: float = 0.0) -> None:
        super().__init__(endpoint, dht, run_id, PROGRESS_KIND, min_period_s)

    def trainers(self) -> dict[PeerId, PeerRecord]:
        """The records of the peers that train, wherever in the run they are."""
        return {peer_id: record for peer_id, record in self.records().items() if not record.is_auxiliary}

    def is_stranded(self) -> bool:
        """Whether others train, and no peer can be dialled."""
        return bool(self.trainers()) and all(record.is_client for record in self.records().values())


class View:
    """The other peers at one position, as last read. Immutable: any news gives another view.

    Args:
        missing: peers that count, but are not expected.

    Attributes:
        trainers: records of the peers that train at the position; of these ``awaited`` are not missing.
        expected: all peers here that are not missing, with auxiliary ones, and whether each is in client mode.
    """

    def __init__(
        self,
        observed: Mapping[PeerId, SeenRecord],
        position: Position,
        missing: Container[PeerId] = (),
    ) -> None:
        here = {peer_id: seen for peer_id, seen in observed.items() if seen.record.position == position}
        self.observed = observed
        self.trainers = {peer_id: seen for peer_id, seen in here.items() if not seen.record.is_auxiliary}
        self.awaited = {peer_id: seen for peer_id, seen in self.trainers.items() if peer_id not in missing}
        self.expected = {peer_id: seen.record.is_client for peer_id, seen in here.items() if peer_id not in missing}
        self._samples = sum([seen.record.samples for seen in self.trainers.values()])
        self._speed = sum([seen.record.samples_per_second for seen in self.trainers.values()])

    def progress(self, own: PeerRecord | None, target_batch_size: int, now: float | None = None) -> Progress:
        """The progress of all trainers together, with this peer if it trains; ``own`` is None if it only watches.

        Args:
            now: predict the others' samples for this instant, up to the target; by default the published ones count.
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

    def arrives_in_s(self, samples: int, within_s: float, now: float, members: Collection[PeerId] = ()) -> float:
        """Predicted seconds until the others have so many samples; infinite if they need longer than ``within_s``.

        A stranger may claim to compute; so once the run has members, only their batches are predicted.
        """

        def samples_of(peer_id: PeerId, seen: SeenRecord, ahead_s: float) -> int:
            is_proven = not members or peer_id in members
            return samples_in(seen.record, now - seen.since, ahead_s) if is_proven else seen.record.samples

        for number in range(1, LOOKS_AHEAD + 1):
            ahead_s = within_s * number / LOOKS_AHEAD
            if sum(samples_of(peer_id, seen, ahead_s) for peer_id, seen in self.awaited.items()) >= samples:
                return ahead_s
        return math.inf

    def busy_until(self, instant: float) -> float:
        """The predicted end of the last batch that one of them computes at an instant."""
        busy = [busy_s(seen.record, instant - seen.since) for seen in self.awaited.values()]
        return instant + max(busy, default=0.0)


class ProgressLog:
    """Logs the progress of the collaboration: news at once, mere growth every ``LOG_S`` seconds.

    News are another global step, another number of peers, and the target reached.
    """

    def __init__(self) -> None:
        self._told: object = None
        self._told_at = -math.inf

    def tell(self, step: int, progress: Progress, refresh_s: float, now: float) -> None:
        """Log the progress after ``step`` global steps, if it is worth a line; the wording is that of the tutorials."""
        news = (step, progress.num_peers, progress.eta_s == 0)
        if news != self._told or now >= self._told_at + LOG_S:
            self._told, self._told_at = news, now
            eta = f"{progress.eta_s:.2f} seconds" if math.isfinite(progress.eta_s) else "unknown"
            samples, peers = counted(progress.samples, "sample"), counted(progress.num_peers, "peer")
            logger.info("Collaboration accumulated %s from %s; ETA %s (refresh in %.2fs.)",
                        samples, peers, eta, refresh_s, extra=SHOWN_LIVE)  # fmt: skip


class StrandedNotice:
    """Warns that no trainer of a run can be dialled, every minute as long as that lasts."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._due_at = math.inf

    def look(self, trainers: Collection[PeerRecord], addresses: Sequence[str], now: float) -> None:
        """Look whether to warn.

        Args:
            trainers: the records of all trainers if none can be dialled, else empty.
            addresses: of any peer through which another one can join.
        """
        if len(trainers) < 2:
            self._due_at = math.inf
        elif self._due_at == math.inf:
            self._due_at = now + LATE_ANSWER_S  # peers that start together see each other one by one
        elif now >= self._due_at:
            self._due_at = now + MINUTE_S
            logger.warning(
                "None of the %d peers that train can be dialled (client mode), so they make no step together; "
                "%s. At least one of them must accept connections: if they are in one network, "
                "behind one router say, start one of them again with --no-client-mode, and the others dial it there. "
                "Or a machine without data helps: on the monitor's machine, or any other that accepts connections, "
                "run: manyhands train --auxiliary %s --initial-peers %s",
                len(trainers), _whose_gradients_are_kept(trainers), shell_option("--run-id", self._run_id),
                " ".join(addresses) or "ADDRESS",
            )  # fmt: skip


def _whose_gradients_are_kept(trainers: Collection[PeerRecord]) -> str:
    """Those of the leading position: the others must load its state first, and clients get none from each other."""
    best = max(trainers, key=branch_order).position
    num_others = sum(record.position != best for record in trainers)
    if not num_others:
        return "their gradients are kept"
    if best.step == 0:
        return "they began with different parameters, and drop their gradients when they load those of another peer"
    return (
        f"the gradients of {len(trainers) - num_others} of them, on the leading branch at step {best.step}, are kept; "
        f"the others ({num_others} of the {len(trainers)}) drop theirs when they load that state"
    )
