"""The progress of the collaboration, from the DHT records of its peers (:mod:`manyhands.averaging.peer_records`).

A record says how many samples its peer had, when it counted them, and how fast it computes. Readers extrapolate from
that: the result is the *predicted* number of samples. So far from the target a peer publishes only what the others
could not have predicted; near the target it publishes each change at once. Predictions decide only when to publish and
to read. A global step is due when the *published* samples reach the target. What a round or another peer says directly
replaces older records.

In a crowd, which is a run of more than ``CROWD`` peers, records live longer and are read less often, by a factor of up
to ``MAX_CROWD_FACTOR``. At the target only the leader of the next round reads; it then calls the others.

In a run of more than ``LARGE`` peers in one group, all but that leader read the records of ``SAMPLE`` random peers at
a time, and those of the next leaders. The peers that they know stand for all
(docs/adr/0048-a-sample-of-the-records.md).
"""

from __future__ import annotations

import enum
import logging
import math
import statistics
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
from manyhands.averaging.timing import DAY_S, LATE_ANSWER_S, LOG_S, MINUTE_S, MOMENT_S
from manyhands.base.identity import PeerId
from manyhands.base.text import counted, shell_option
from manyhands.dht import DhtNode
from manyhands.optim.config import ProgressConfig
from manyhands.rpc import Endpoint

logger = logging.getLogger(__name__)

SHOWN_LIVE = {"is_shown_live": True}
"""``extra`` of log lines that a live view of the training leaves out, as it always shows the same numbers."""
NEWS_SHARE = 0.1
"""A peer publishes when the prediction of its samples is wrong by more than this share of its part of the target."""
NEWS_SPEED = 0.2
"""A peer publishes when its speed has changed by more than this share of the published one."""
NEWCOMERS = 3
"""Number of peers that may join before the records are read again; in a larger run it is ``NEWCOMERS_SHARE``
of its peers."""
NEWCOMERS_SHARE = 0.2
LOOKS_AHEAD = 16
"""Number of instants at which :meth:`View.arrives_in_s` predicts the others' samples."""
CROWD = 40
"""The largest number of peers whose records are read at the ordinary rate."""
MAX_CROWD_FACTOR = 6.0
"""The largest factor on lifetimes and read periods of records in a crowd."""
LARGE = 128
"""The largest number of peers whose records are all read at each refresh."""
SAMPLE = 64
"""The number of random peers whose records are read at once in a larger run: at 0.7 kB for each record, once or twice a
minute, it is 0.7 to 1.5 kB/s."""
NUM_LEADERS = 8
"""The number of next leaders whose records are read beside a sample, as several in a row may be gone."""
MAX_SHARE = 8.0
"""In a sample a peer counts for at most this many times as much as the median peer. So one record moves the
sum of a sample of k peers by at most about ``MAX_SHARE`` / k."""
MAX_COUNT = 2**53
"""The largest number of samples: all integers up to it are exact as floats."""
MAX_SPEED = 1e9
"""The largest speed, in samples per second, that is believed, so that sums of strangers' numbers stay exact."""


class Claim(enum.IntEnum):
    """Why a run should begin from the parameters of a peer at step 0; the highest claim wins.

    A peer that loads the parameters of another one at step 0 takes over the claim of that peer.
    """

    NEWCOMER = 0  # it joins, and has not loaded the parameters of the others; or it does not train
    JOINED = 1  # it has joined, and nobody else's parameters were there
    TOLD = 2  # its user says, with start_new=True, that its parameters are those of the run


@dataclass(frozen=True)
class Progress:
    """The common progress of all peers at one position towards the next global step.

    Attributes:
        samples: of all these peers together.
        num_peers: number of these peers that train.
        samples_per_second: their speed, all together.
        eta_s: seconds until the target at that speed; infinite if no peer computes.
    """

    samples: int
    num_peers: int
    samples_per_second: float
    eta_s: float


def extrapolated_samples(record: PeerRecord, age_s: float, *, is_sampled: bool = False) -> float:
    """The samples of a peer ``age_s`` seconds after it published this record, if it goes on at the published speed.

    Args:
        is_sampled: later records of the peer may not have been read.
    """
    since_count_s = _since_count_s(record, age_s)
    if is_sampled:
        since_count_s = max(age_s, 0.0) + min(record.counted_s_ago, DAY_S)
    return min(MAX_COUNT, record.samples + min(record.samples_per_second, MAX_SPEED) * since_count_s)


def samples_in(record: PeerRecord, age_s: float, ahead_s: float) -> int:
    """The samples that a peer will have in ``ahead_s`` seconds, in whole batches, by extrapolation.

    They are the published samples if the record does not say how long a batch takes.

    Args:
        age_s: seconds since the peer published the record.
    """
    if (batch_s := record.batch_s) <= 0:
        return record.samples
    num_batches = (_since_count_s(record, age_s) + ahead_s) // batch_s
    more = min(record.samples_per_second, MAX_SPEED) * batch_s * num_batches
    return min(record.samples + round(min(more, MAX_COUNT)), MAX_COUNT)


def _since_count_s(record: PeerRecord, age_s: float) -> float:
    """Seconds since a peer counted its samples, at most up to when its next record is due: none later is relied on."""
    ttl_s = min(record.ttl_s, DAY_S)  # finite, whatever a stranger has published
    return min(max(age_s, 0.0), ttl_s / KEEP_ALIVES) + min(record.counted_s_ago, ttl_s)


def busy_s(record: PeerRecord, age_s: float) -> float:
    """Predicted seconds until the end of the batch that a peer computes now.

    0 if the record does not say how long a batch takes, or if the peer has counted no samples for two batches.
    """
    elapsed_s = age_s + min(record.counted_s_ago, DAY_S)
    if not 0 <= elapsed_s < 2 * record.batch_s:
        return 0.0
    return record.batch_s - elapsed_s % record.batch_s


def crowd_factor(num_peers: int) -> float:
    """The factor by which records live longer, and are read less often, in a crowd; 1 with up to ``CROWD`` peers."""
    return min(max(num_peers / CROWD, 1.0), MAX_CROWD_FACTOR)


def is_news(
    published: PeerRecord, age_s: float, own: PeerRecord, target_batch_size: int, num_peers: int, is_near: bool
) -> bool:
    """Whether a peer must publish its record ``own``, as the others cannot predict it from the record ``published``.

    Args:
        age_s: seconds since it was published.
        is_near: the target may be reached before this peer's next batch; then the others need the exact number.
    """
    is_moved = (own.position, own.seat, own.sketch) != (published.position, published.seat, published.sketch)
    if is_moved or (is_near and own.samples != published.samples):
        return True
    if abs(own.samples_per_second - published.samples_per_second) > NEWS_SPEED * published.samples_per_second:
        return True
    share = target_batch_size / max(num_peers, 1)
    return abs(extrapolated_samples(published, age_s) - own.samples) > NEWS_SHARE * share


def next_refresh_s(progress: Progress, config: ProgressConfig) -> float:
    """Seconds until the records should be read again: before the predicted target, as newcomers may bring it nearer.

    It is ``MOMENT_S`` while no peer's speed is known.
    """
    num_peers = progress.num_peers
    newcomers = max(NEWCOMERS, NEWCOMERS_SHARE * num_peers)
    predicted_s = progress.eta_s * num_peers / (num_peers + newcomers) if math.isfinite(progress.eta_s) else MOMENT_S
    return min(max(predicted_s, config.min_refresh_s), config.max_refresh_s * crowd_factor(num_peers))


def sum_of_samples(numbers: Iterable[float]) -> int:
    """The rounded sum of numbers of samples, at most ``MAX_COUNT``."""
    return round(min(math.fsum(numbers), MAX_COUNT))


def sum_of_sample(numbers: Sequence[float], weight: float | None) -> float:
    """What all peers have together, if each of these stands for ``weight`` peers; the plain sum if that is None.

    Source: an expansion estimator with top-coded values; see docs/adr/0048-a-sample-of-the-records.md for its error.
    """
    if weight is not None and numbers:
        most = MAX_SHARE * statistics.median(numbers)
        return weight * math.fsum(min(number, most) for number in numbers)
    return sum(numbers)


def branch_order(record: PeerRecord) -> tuple[int, int, int, bytes]:
    """The sort key of the branch that a peer is on: the branch with the highest key is the best one."""
    claim = record.claim if record.position.step == 0 else 0
    return (record.position.step, claim, record.lineage_samples, record.position.lineage)


def gone_to(seen: SeenRecord, position: Position, lineage_samples: int, now: float) -> SeenRecord:
    """The record that a peer will publish after its step to a position, as far as others know already."""
    record = msgspec.structs.replace(
        seen.record, position=position, samples=0, lineage_samples=lineage_samples, counted_s_ago=0.0,
        ttl_s=max(seen.expires_at - now, 0.0),
    )  # fmt: skip
    return SeenRecord(record, seen.expires_at, is_direct=True)


class ProgressReader(PeerRecords):
    """Reads the progress records of a run. Peers that only watch it need no more."""

    def __init__(self, endpoint: Endpoint, dht: DhtNode, run_id: str, min_period_s: float = 0.0) -> None:
        super().__init__(endpoint, dht, run_id, PROGRESS_KIND, min_period_s)

    def trainers(self) -> dict[PeerId, PeerRecord]:
        """The records of the other peers that train, at any position of the run."""
        return {peer_id: record for peer_id, record in self.records().items() if not record.is_auxiliary}

    def is_stranded(self) -> bool:
        """Whether other peers train, and none of the other peers accepts connections."""
        return bool(self.trainers()) and all(record.is_client for record in self.records().values())


class View:
    """The other peers at one position, as last read. Immutable: a change of the records gives another view.

    Args:
        observed: the records of all other peers of the run.
        missing: peers whose samples count, but that are not expected at the next round.
        barred: peers that get no place in the next round, so their samples do not count either.
        weight: how many peers each record stands for, if only the records of a sample were read; else None.

    Attributes:
        trainers: records of the peers that train at the position.
        awaited: records of the trainers that are not missing.
        expected: all peers at the position that are not missing, auxiliary ones too; for each whether it is in client
            mode.
    """

    def __init__(
        self,
        observed: Mapping[PeerId, SeenRecord],
        position: Position,
        missing: Container[PeerId] = (),
        barred: Container[PeerId] = (),
        weight: float | None = None,
    ) -> None:
        here = {
            peer_id: seen
            for peer_id, seen in observed.items()
            if seen.record.position == position and peer_id not in barred
        }
        self.observed = observed
        self.trainers = {peer_id: seen for peer_id, seen in here.items() if not seen.record.is_auxiliary}
        self.awaited = {peer_id: seen for peer_id, seen in self.trainers.items() if peer_id not in missing}
        self.expected = {peer_id: seen.record.is_client for peer_id, seen in here.items() if peer_id not in missing}
        self._weight = weight
        self._samples = round(sum_of_sample([seen.record.samples for seen in self.trainers.values()], weight))
        self._speed = sum_of_sample([seen.record.samples_per_second for seen in self.trainers.values()], weight)

    def progress(self, own: PeerRecord | None, target_batch_size: int, now: float | None = None) -> Progress:
        """The progress of all trainers together.

        Args:
            own: the record of this peer, which is added if it trains; None if this peer only watches.
            now: predict the others' samples for this instant, up to the target; by default the published ones count.
        """
        num_peers = round(len(self.trainers) * (self._weight or 1.0))
        samples = self._samples
        speed = self._speed
        more = 0
        if now is not None:
            is_sampled = self._weight is not None
            predicted = [
                extrapolated_samples(seen.record, now - seen.since, is_sampled=is_sampled)
                for seen in self.trainers.values()
            ]
            more = int(sum_of_sample(predicted, self._weight)) - samples
        if own is not None and not own.is_auxiliary:
            num_peers += 1
            samples += own.samples
            speed += own.samples_per_second
        samples += max(min(more, target_batch_size - samples), 0)  # at the target peers wait, and compute no more
        missing = max(target_batch_size - samples, 0)
        if missing == 0:
            eta_s = 0.0
        elif speed > 0:
            eta_s = missing / speed
        else:
            eta_s = math.inf
        return Progress(samples, num_peers, speed, eta_s)

    def arrives_in_s(self, samples: int, within_s: float, now: float, voters: Collection[PeerId] = ()) -> float:
        """Predicted seconds until the awaited peers have so many samples; infinite if that is beyond ``within_s``.

        Args:
            voters: of the roster. If there are any, only their batches are predicted, and of other peers the published
                samples count: a stranger may claim to compute.
        """

        def samples_of(peer_id: PeerId, seen: SeenRecord, ahead_s: float) -> int:
            is_proven = not voters or peer_id in voters
            return samples_in(seen.record, now - seen.since, ahead_s) if is_proven else seen.record.samples

        for number in range(1, LOOKS_AHEAD + 1):
            ahead_s = within_s * number / LOOKS_AHEAD
            if sum(samples_of(peer_id, seen, ahead_s) for peer_id, seen in self.awaited.items()) >= samples:
                return ahead_s
        return math.inf

    def busy_until(self, instant: float, voters: Collection[PeerId] = ()) -> float:
        """When the batches that the awaited peers compute at an instant will all have ended, by prediction.

        Args:
            voters: of the roster. If there are any, only their batches count: a guest may lie about its own.
        """
        busy = [
            busy_s(seen.record, instant - seen.since)
            for peer_id, seen in self.awaited.items()
            if not voters or peer_id in voters
        ]
        return instant + max(busy, default=0.0)


class ProgressLog:
    """Logs the progress of the collaboration every ``LOG_S`` seconds, and important changes at once.

    These are: another global step, another number of peers, and the target reached.
    """

    def __init__(self) -> None:
        self._told: object = None
        self._told_at = -math.inf

    def tell(self, step: int, progress: Progress, refresh_s: float, now: float) -> None:
        """Log the progress after ``step`` global steps, if that is due. The tutorials quote the line."""
        news = (step, progress.num_peers, progress.eta_s == 0)
        if news != self._told or now >= self._told_at + LOG_S:
            self._told, self._told_at = news, now
            eta = f"{progress.eta_s:.2f} seconds" if math.isfinite(progress.eta_s) else "unknown"
            samples = counted(progress.samples, "sample")
            peers = counted(progress.num_peers, "peer")
            logger.info("Collaboration accumulated %s from %s; ETA %s (refresh in %.2fs.)",
                        samples, peers, eta, refresh_s, extra=SHOWN_LIVE)  # fmt: skip


class StrandedNotice:
    """Warns every minute while no trainer of a run accepts connections, so that they cannot reach each other."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._due_at = math.inf

    def look(self, trainers: Collection[PeerRecord], addresses: Sequence[str], now: float) -> None:
        """Warn if it is time.

        Args:
            trainers: the records of all trainers if none of them accepts connections; else empty.
            addresses: those of a peer through which others can join.
        """
        if len(trainers) < 2:
            self._due_at = math.inf
        elif self._due_at == math.inf:
            self._due_at = now + LATE_ANSWER_S  # of peers that start together, each sees the others one by one
        elif now >= self._due_at:
            self._due_at = now + MINUTE_S
            logger.warning(
                "None of the %d peers that train can be dialled (client mode), so they make no step together; "
                "%s. At least one of them must accept connections: if they are in one network, "
                "behind one router say, start one of them again with --no-client-mode, and the others dial it there. "
                "Or a machine without data helps (with a training loop of your own: that program, with "
                "Optimizer(auxiliary=True)): on the monitor's machine, or any other that accepts connections, "
                "run: manyhands train --auxiliary %s --initial-peers %s",
                len(trainers), _whose_gradients_are_kept(trainers), shell_option("--run-id", self._run_id),
                " ".join(addresses) or "ADDRESS",
            )  # fmt: skip


def _whose_gradients_are_kept(trainers: Collection[PeerRecord]) -> str:
    """Says whose gradients are kept while no trainer accepts connections, for the warning.

    Those of the trainers at the leading position are kept. The others drop theirs when they load its state, for which
    they need a peer in between: clients cannot send each other the state.
    """
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
