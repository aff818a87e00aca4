"""How far the collaboration is, from the records of its peers. Pure.

A record says how many samples its peer had, when, and how fast it computes; whoever reads it later reckons on from
there. So far from the target a peer publishes only what the others could not have reckoned: another position, other
parameters, other samples than its last record leads to, another speed. What is reckoned only decides when to publish
and to read: a global step is due when the samples that peers have *said* they have reach the target, and near it each
says so at once.

In a crowd each peer counts for less, so less is told and read of each:

* above ``CROWD`` peers records live longer and are read more seldom, up to ``MAX_CROWD_FACTOR`` times: so a peer reads
  about as many records a minute whatever the size of the swarm;
* the errors of many who were reckoned average out, so each may be wrong by the square root of their number more;
* at the target not all need to look: who leads the round calls the others. A peer looks ``RANK_DELAY_S`` later for each
  one that would lead before it, and not at all once it is called; nor during a round of all peers, which tells where
  they are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from manyhands.averaging.grid.seats import NO_SEAT, Seat
from manyhands.averaging.messages import Count, Position, RecentRounds
from manyhands.averaging.peer_records import KEEP_ALIVES
from manyhands.averaging.sketch import MAX_SKETCH_BYTES
from manyhands.base.text import counted
from manyhands.optim.config import ProgressConfig

logger = logging.getLogger(__name__)

SHOWN_LIVE = {"is_shown_live": True}
"""``extra`` of the log lines that say what a live view shows at every moment, so that it can leave them out."""
LOG_PERIOD_S = 10.0
NEWS_SHARE = 0.1
"""Of a peer's share of the target: by so much may the others be wrong about its samples."""
NEWS_SPEED = 0.2
"""And by so much about its speed."""
CROWD = 40
MAX_CROWD_FACTOR = 6.0
RANK_DELAY_S = 0.05
MAX_COUNT = 2**53
MAX_TTL_S = 86400.0
MAX_SPEED = 1e9
"""Samples per second that are believed: sums of what strangers say stay exact."""
MAX_OPTIONS = 8
"""Options of the optimizer that a peer publishes, as its schedule has changed them; names of so many characters ..."""
MAX_OPTION_NAME = 32
MAX_OPTION_NUMBERS = 16
"""... and of each so many numbers: one for each parameter group, or two for ``betas``."""

Numbers = dict[
    Annotated[str, msgspec.Meta(max_length=MAX_OPTION_NAME)],
    Annotated[list[float], msgspec.Meta(max_length=MAX_OPTION_NUMBERS)],
]

MAX_WALL_TIME_S = 1e11  # the year 5138


class ProgressRecord(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What one peer says of itself; published under its own signature.

    Attributes:
        position: global step and lineage.
        samples: accumulated since the last global step.
        samples_per_second: own speed.
        lineage_samples: samples in all the committed steps that led to this position.
        is_client: it cannot be dialled.
        addresses: where it can be.
        ttl_s: the record counts for so long.
        counted_s_ago: when it was published, so long ago were the samples counted.
        batch_s: seconds that the peer takes for a batch; 0: it does not know yet.
        seat: its place among the groups of a run that is too large for one, as of the round ``seat_round``.
        sketch: sums of the parameters that it held after its last step, as float32; see
            :mod:`manyhands.optim.run.drift`.
        sketch_step: the global step that this led to; 0 without one.
        recent_rounds: of its last steps, if they were made in a grid (:mod:`manyhands.optim.run.partition_detector`).
        is_auxiliary: it has no data; it is not expected in a round, unless nobody else can be dialled.
        options: of its optimizer at this position, those that are not as in the manifest: the learning rates, say, of
            all parameter groups; None if it does not say.
        began_at: when its process began, by its own wall clock: two processes with one identity differ in it.
    """

    position: Position
    samples: Count
    samples_per_second: float
    lineage_samples: Count
    is_client: bool
    addresses: list[str]
    ttl_s: float
    counted_s_ago: float = 0.0
    batch_s: float = 0.0
    seat: Seat = NO_SEAT
    seat_round: Count = 0
    sketch: Annotated[bytes, msgspec.Meta(max_length=MAX_SKETCH_BYTES)] = b""
    sketch_step: Count = 0
    recent_rounds: RecentRounds = []
    is_auxiliary: bool = False
    options: Annotated[Numbers, msgspec.Meta(max_length=MAX_OPTIONS)] | None = None
    began_at: float = 0.0

    def __post_init__(self) -> None:
        if not (
            0 <= self.samples_per_second < math.inf
            and 0 <= self.ttl_s < math.inf
            and 0 <= self.counted_s_ago < math.inf
            and 0 <= self.batch_s < math.inf
            and 0 <= self.began_at < MAX_WALL_TIME_S
        ):
            raise ValueError("speeds and times are finite and >= 0")


@dataclass(frozen=True)
class Progress:
    """How far the collaboration is towards its next global step.

    Attributes:
        samples: accumulated at this position by all peers together.
        num_peers: peers that train at this position, with this one.
        samples_per_second: of all peers.
        eta_s: seconds until the target at that speed; infinite when nobody computes.
    """

    samples: int
    num_peers: int
    samples_per_second: float
    eta_s: float


class Reckoning(msgspec.Struct, frozen=True, gc=False):
    """How a peer's samples must grow, if it goes on as fast as it said.

    Attributes:
        samples: when they were counted.
        samples_per_second: since then.
        since: when that was said.
        counted_s_ago: before it was said, so long ago were they counted.
        limit_s: so long after it was said the peer is not reckoned on any more: until its next record is due.
    """

    samples: int
    samples_per_second: float
    since: float
    counted_s_ago: float
    limit_s: float

    @classmethod
    def of(cls, record: ProgressRecord, since: float) -> Reckoning:
        """From what a peer said at an instant; one that says nothing for longer than it should is not reckoned on."""
        ttl_s, counted_s_ago, speed = record.ttl_s, record.counted_s_ago, record.samples_per_second
        if ttl_s > MAX_TTL_S:  # whatever a stranger says, the product is a number
            ttl_s = MAX_TTL_S
        if counted_s_ago > ttl_s:
            counted_s_ago = ttl_s
        if speed > MAX_SPEED:
            speed = MAX_SPEED
        return cls(record.samples, speed, since, counted_s_ago, ttl_s / KEEP_ALIVES)

    def at(self, now: float) -> float:
        """The samples that the peer must have at an instant; within a batch a fraction of it counts."""
        age_s = now - self.since
        if age_s > self.limit_s:
            age_s = self.limit_s
        elif age_s < 0.0:
            age_s = 0.0
        samples = self.samples + self.samples_per_second * (age_s + self.counted_s_ago)
        return min(MAX_COUNT, samples)

    def with_batch_at(self, now: float, batch_s: float) -> int:
        """The samples that the peer must have when it has finished the batch that it computes at an instant.

        Args:
            batch_s: what a batch takes it; 0 if it has not said so, and then only what it has counted counts.
        """
        if batch_s <= 0:
            return self.samples
        elapsed_s = min(max(now - self.since, 0.0), self.limit_s) + self.counted_s_ago
        more = self.samples_per_second * batch_s * (elapsed_s // batch_s + 1)
        return min(self.samples + round(min(more, MAX_COUNT)), MAX_COUNT)


def reckoned_samples(record: ProgressRecord, age_s: float) -> int:
    """The samples that a peer must have by now, if it went on as fast as it said.

    Args:
        age_s: since the record was published.
    """
    return int(Reckoning.of(record, 0.0).at(age_s))


def busy_until(record: ProgressRecord, reckoning: Reckoning, instant: float) -> float:
    """When a peer must have finished the batch that it computes at an instant; that instant when it cannot be told.

    One that has counted nothing for two of its batches is not relied on: it may be gone.
    """
    elapsed_s = instant - reckoning.since + reckoning.counted_s_ago
    if record.batch_s <= 0 or not 0 <= elapsed_s < 2 * record.batch_s:
        return instant
    return instant + record.batch_s - elapsed_s % record.batch_s


def crowd_factor(num_peers: int) -> float:
    """How much longer records live, and how much more seldom they are read, than with few peers."""
    return min(max(num_peers / CROWD, 1.0), MAX_CROWD_FACTOR)


def is_news(
    published: ProgressRecord,
    age_s: float,
    own: ProgressRecord,
    target_batch_size: int,
    num_peers: int,
    is_near: bool,
) -> bool:
    """Whether the others have to be told where a peer is now, as they could not have reckoned it.

    Args:
        published: what it told last, ``age_s`` seconds ago.
        own: what it would tell now.
        target_batch_size: samples of a global step, of all ``num_peers`` together.
        is_near: the target may be reached before this peer's next batch; then exact numbers count.
    """
    is_moved = (own.position, own.seat, own.seat_round, own.recent_rounds, own.sketch, own.options) != (
        published.position, published.seat, published.seat_round, published.recent_rounds, published.sketch,
        published.options,
    )  # fmt: skip
    if is_moved or (is_near and own.samples != published.samples):
        return True
    leeway = math.sqrt(crowd_factor(num_peers))
    if abs(own.samples_per_second - published.samples_per_second) > NEWS_SPEED * leeway * published.samples_per_second:
        return True
    share = target_batch_size / max(num_peers, 1)
    return abs(reckoned_samples(published, age_s) - own.samples) > NEWS_SHARE * leeway * share


def describe_progress(progress: Progress, refresh_s: float) -> str:
    """The sentence that people know from the tutorials."""
    eta = f"{progress.eta_s:.2f} seconds" if math.isfinite(progress.eta_s) else "unknown"
    return (
        f"Collaboration accumulated {progress.samples} samples from {counted(progress.num_peers, 'peer')}; "
        f"ETA {eta} (refresh in {refresh_s:.2f}s.)"
    )


def next_refresh_s(progress: Progress, config: ProgressConfig) -> float:
    """When to read the records again: earlier than the predicted target by the drift that newcomers may bring."""
    num_peers = progress.num_peers
    drift = max(num_peers + config.expected_drift_peers, num_peers * (1 + config.expected_drift_rate))
    predicted_s = progress.eta_s * num_peers / drift if math.isfinite(progress.eta_s) else config.default_refresh_s
    return min(max(predicted_s, config.min_refresh_s), config.max_refresh_s * crowd_factor(num_peers))


def sum_of_samples(numbers: Iterable[float]) -> int:
    """At most as many as a record can say."""
    return round(min(math.fsum(numbers), MAX_COUNT))


def rank_of(record: ProgressRecord) -> tuple[int, int, bytes]:
    """Orders the branches of a run: the higher one wins."""
    return (record.position.step, record.lineage_samples, record.position.lineage)


class ProgressLog:
    """Logs how far the collaboration is: what is new at once, mere growth every :data:`LOG_PERIOD_S` seconds.

    New are another global step, another number of peers, an ETA that was unknown before, and the target reached.
    """

    def __init__(self) -> None:
        self._last_place = (-1, 0)
        self._last_stage = 0
        self._told_at = -math.inf

    def tell(self, step: int, progress: Progress, refresh_s: float, now: float) -> None:
        """Log the progress, if it is worth a line.

        Args:
            step: global steps that are made.
            refresh_s: until the records are read again.
            now: seconds of any clock.
        """
        if self._is_worth_a_line(step, progress, now):
            logger.info("%s", describe_progress(progress, refresh_s), extra=SHOWN_LIVE)

    def _is_worth_a_line(self, step: int, progress: Progress, now: float) -> bool:
        place, stage = (step, progress.num_peers), _stage(progress)
        if place == self._last_place and stage <= self._last_stage and now < self._told_at + LOG_PERIOD_S:
            return False
        self._last_place, self._last_stage, self._told_at = place, stage, now
        return True


def _stage(progress: Progress) -> int:
    """0: nobody knows when the target will be reached; 1: it is known; 2: it is reached."""
    return 2 if progress.eta_s == 0 else 1 if math.isfinite(progress.eta_s) else 0
