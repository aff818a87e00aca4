"""Watches a run without training; never imports torch.

At each look it reads what the peers have published, and makes a :class:`manyhands.monitor.picture.RunPicture` of it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Protocol

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import SeenRecord
from manyhands.averaging.timing import METRICS_S
from manyhands.base.errors import ConfigError, ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.base.run_id import checked_run_id
from manyhands.base.text import counted
from manyhands.dht import DhtNode
from manyhands.monitor.aggregator import Aggregator, Look
from manyhands.monitor.coordinator_exchange import Exchange, named_peers
from manyhands.monitor.history import History
from manyhands.monitor.monitor_events import HeldoutSeen, MonitorEvent, ProgressMade
from manyhands.monitor.peer_table import longest_silence_s
from manyhands.monitor.picture import LeaderboardRow, RunPicture
from manyhands.monitor.steps import SETTLED_S, CompleteSteps
from manyhands.optim.config import ProgressConfig
from manyhands.optim.manifest import different_settings, read_manifests
from manyhands.optim.metrics import AccountRecord, HeldoutRecord, MetricsRecord, read_metrics
from manyhands.optim.run.belief import held_by_most
from manyhands.optim.run.progress import (
    SHOWN_LIVE,
    Progress,
    ProgressLog,
    ProgressReader,
    StrandedNotice,
    View,
    crowd_factor,
    gone_to,
    next_refresh_s,
)
from manyhands.optim.run.run_records import declare_run
from manyhands.peer import Presence
from manyhands.rpc import Endpoint
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

MAX_REFRESH_S = 3.0
MIN_REFRESH_S = 0.5
LONGEST_REFRESH_S = METRICS_S
"""Largest ``refresh_s``: the lifetime of metrics, which a slower monitor would miss."""
SILENCE_STEP_S = 0.1
"""Shortest delay in seconds of the look at which a silent peer counts as gone."""

TELL_PERIOD_S = 60.0
"""Seconds between two log lines that say that no peer trains."""

CROWD_PERIOD_S = 1.5
"""Seconds between two pictures for each unit of ``crowd_factor`` above 1: 7.5 s with 240 peers and more."""
ASK_PERIOD_S = 15.0
"""Seconds until other monitors are asked for the earlier history, and between two attempts while none answers."""


class WatchingPeer(Protocol):
    """The part of a :class:`manyhands.Peer` that a monitor uses."""

    presence: Presence

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def dht(self) -> DhtNode: ...

    @property
    def addresses(self) -> list[str]: ...


class WatchingReader(ProgressReader):
    """The progress records of a run, with that of this peer, if it trains as well."""

    def _look_at_own(self, seen: SeenRecord, now: float) -> None:
        self._keep(self._endpoint.peer_id, seen)

    def present(self) -> dict[PeerId, SeenRecord]:
        """The records of the peers that have published lately: a dead one must not hold the progress back."""
        now = asyncio.get_running_loop().time()
        return {
            peer_id: seen
            for peer_id, seen in self.observed().items()
            if now - seen.since <= longest_silence_s(seen.record)
        }


class RunMonitor:
    """Reads the progress and the metrics of a run, and logs them.

    Attributes:
        picture: of the last look; None before the first one.
        history: of the run.

    Args:
        history: closed with the peer; by default one in memory.
        on_event: called on the network thread with each :data:`.monitor_events.MonitorEvent`; must not block.
        refresh_s: longest time between two reads; reads are more frequent shortly before a global step.
        is_quiet: log only warnings, for a process that logs the progress of the run itself.
    Raises:
        ConfigError: an argument is out of bounds.
    """

    def __init__(
        self,
        peer: WatchingPeer,
        run_id: str,
        on_event: Callable[[MonitorEvent], None],
        *,
        refresh_s: float = MAX_REFRESH_S,
        history: History | None = None,
        is_quiet: bool = False,
    ) -> None:
        self._peer = peer
        self._run_id = checked_run_id(run_id)
        self._is_quiet = is_quiet
        self._told_level = logging.DEBUG if is_quiet else logging.INFO
        self._on_event = on_event
        self._refresh_s = checked_refresh_s(refresh_s)
        self._config = ProgressConfig(min_refresh_s=MIN_REFRESH_S, max_refresh_s=refresh_s, ttl_s=2 * LONGEST_REFRESH_S)
        self._tasks = TaskOwner("monitor")
        self.history = history or History(self._run_id)
        self.picture: RunPicture | None = None
        self._aggregator = Aggregator(self._run_id, self.history)
        self._tell_of_nobody_at = -math.inf
        self._notice = StrandedNotice(run_id)
        self._are_others_told = False
        self._steps = CompleteSteps()
        self._trainers_seen: dict[PeerId, float] = {}  # when last seen, also of those that have left
        self._leading_step = -1
        self._heldout_step = -1
        self._read: set[tuple[PeerId, MetricsRecord | HeldoutRecord]] = set()  # at the last look
        self._stale = self._read  # published before the run went back to an earlier step
        self._last_progress: tuple[int, Progress] | None = None
        self._progress: Progress | None = None  # of the last look
        self._target = 0
        self._aggregated_at = -math.inf
        self._log = ProgressLog()

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self._run_id

    def leader_of(self, peer_id: str) -> LeaderboardRow | None:
        """The row of the leaderboard with this peer, whatever its rank; None for an unknown peer. From any thread."""
        return next((leader for leader in self._aggregator.all_leaders if peer_id in leader.peer_ids), None)

    async def start(self) -> None:
        """Start watching; ends when the peer is closed."""
        declare_run(self._peer.dht, self._run_id)
        self._reader = WatchingReader(self._peer.endpoint, self._peer.dht, self._run_id)
        self._exchange = Exchange(self._peer.presence, self._run_id, self.history)
        self._peer.presence.on_close.append(self._close)
        self._tasks.spawn(self._watch_forever(), name="watching the run")
        self._tasks.spawn(self._ask_others(), name="asking other monitors")

    async def _close(self) -> None:
        self._exchange.close()
        await self._tasks.close()
        await asyncio.get_running_loop().run_in_executor(None, self.history.close)

    async def _ask_others(self) -> None:
        """Fetch the history before this monitor's start, once, from each of the peers that were named to it."""
        is_told = False
        while not is_told:
            await asyncio.sleep(ASK_PERIOD_S)
            before_step = self._aggregator.first_step
            if before_step == 1:
                return  # it has seen all
            if before_step == 0:
                continue  # it has seen nothing yet
            for peer_id in named_peers(self._peer.presence, self._run_id):
                try:
                    told = await self._exchange.ask(peer_id, before_step, self._aggregator.began_at)
                except ManyhandsError as error:
                    logger.debug("peer %s did not send the history of the run: %s", peer_id, error)
                    continue
                is_told = True
                self._aggregator.told.append(told)
                logger.log(
                    self._told_level,
                    "Peer %s sent %s and %s from before this monitor started", peer_id,
                    counted(len(told.points), "point"), counted(len(told.steps), "credited step"),
                )  # fmt: skip

    async def _watch_forever(self) -> None:
        while True:
            delay_s = self._refresh_s
            try:
                delay_s = await self._look()
                await self._aggregate()
                delay_s = min(delay_s, max(self._aggregator.silence_due_s, SILENCE_STEP_S))
            except ManyhandsError as error:
                logger.warning("Cannot read the records of the run: %s; trying again", error)
            await asyncio.sleep(delay_s)

    def _tell_that_nobody_trains(self) -> None:
        """Log it at once, and then from time to time, for a person who waits for trainers."""
        now = asyncio.get_running_loop().time()
        if now >= self._tell_of_nobody_at:
            self._tell_of_nobody_at = now + TELL_PERIOD_S
            logger.log(self._told_level, "Found no active peers", extra=SHOWN_LIVE)

    async def _look(self) -> float:
        """Read and report once; returns the seconds until the next read."""
        await self._reader.refresh()
        present = self._reader.present()
        trainers = {peer_id: seen.record for peer_id, seen in present.items() if not seen.record.is_auxiliary}
        if not trainers:
            self._tell_that_nobody_trains()
            self._progress = None
            await self._report_what_was_learnt(trainers)  # metrics of the last steps, also of peers that have left
            return 1.0
        self._tell_of_nobody_at = -math.inf
        self._tell_stranded()
        leading = held_by_most(trainers)
        target = await self._target_batch_size() or self._target
        now = asyncio.get_running_loop().time()
        progress = View(_all_at(leading, present, now), leading).progress(None, target, now)
        if not target:  # no manifest has been read yet, as after a restart beside trainers in client mode
            progress = replace(progress, eta_s=math.inf)
        delay_s = next_refresh_s(progress, self._config)
        self._progress = progress
        self._target = target
        if (leading.step, progress) != self._last_progress:
            self._report_progress(leading.step, target, progress, delay_s)
            self._last_progress = (leading.step, progress)
        if leading.step + 1 < self._steps.newest_step:  # the run was begun anew, or resumed from a checkpoint
            self._aggregator.restarted(self._steps.newest_step, leading.step, self._peer.presence.wall_clock())
            logger.log(
                self._told_level,
                "The run has gone back to step %d from step #%d: it was begun anew, or resumed from a checkpoint",
                leading.step, self._steps.newest_step,
            )  # fmt: skip
            self._steps = CompleteSteps()
            self._heldout_step = -1
            self._stale = self._read
        self._leading_step = leading.step
        await self._report_what_was_learnt(trainers)
        return min(delay_s, SETTLED_S) if self._steps.is_waiting else delay_s

    def _tell_stranded(self) -> None:
        """Warn if all trainers are behind firewalls: newcomers can join only through other peers, such as this one."""
        trainers = self._reader.trainers() if self._reader.is_stranded() else {}
        self._notice.look(list(trainers.values()), self._peer.addresses, asyncio.get_running_loop().time())

    async def _target_batch_size(self) -> int:
        expected = self._peer.presence.signed_manifests().get(self._run_id, b"")
        signed = await read_manifests(self._peer.dht, self._run_id, expected)
        if len(signed) > 1 and not self._are_others_told:
            self._are_others_told = True
            shown, other = signed
            here, there = (f"at {counted(len(one.signers), 'peer')}" for one in signed)
            logger.warning(
                "Two groups of peers train run %s with different settings, and share no work: %s. Start one of them "
                "again with another --run-id, or with the settings of the other",
                self._run_id, different_settings(shown.manifest, other.manifest, here, there),
            )  # fmt: skip
        return signed[0].manifest.target_batch_size if signed else 0

    def _report_progress(self, step: int, target: int, progress: Progress, delay_s: float) -> None:
        if not self._is_quiet:
            self._log.tell(step, progress, delay_s, asyncio.get_running_loop().time())
        eta_s = progress.eta_s if math.isfinite(progress.eta_s) else None
        self._on_event(
            ProgressMade(
                step, progress.samples, target, progress.num_peers, round(progress.samples_per_second, 3), eta_s
            )
        )

    async def _report_what_was_learnt(self, trainers: Collection[PeerId]) -> None:
        if self._leading_step >= 0:  # otherwise no trainer has been seen yet
            metrics = await read_metrics(self._peer.dht, self._run_id, MetricsRecord)
            measured = await read_metrics(self._peer.dht, self._run_id, HeldoutRecord)
            self._read = {*metrics.items(), *measured.items()}
            self._report_steps(dict(metrics.items() - self._stale), trainers)
            self._report_heldout(dict(measured.items() - self._stale))

    async def _aggregate(self) -> None:
        """Add the records that were read to the picture and the history; less often in a crowd, as it takes longer."""
        crowd = crowd_factor(len(self._reader.observed())) - 1
        if asyncio.get_running_loop().time() < self._aggregated_at + CROWD_PERIOD_S * crowd:
            return
        accounts = await read_metrics(self._peer.dht, self._run_id, AccountRecord)
        now = asyncio.get_running_loop().time()
        look = Look(
            observed=self._reader.observed(),
            accounts=accounts,
            trained_lately=self._trainers_seen,
            step=max(self._leading_step, 0),
            progress=self._progress,
            target_batch_size=self._target,
            num_refused=sum(self._peer.dht.refusals.values()),
            now=now,
            wall_time=self._peer.presence.wall_clock(),
        )
        self._aggregated_at = now
        loop = asyncio.get_running_loop()  # in the executor: with thousands of peers it takes a quarter of a second
        self.picture, events = await loop.run_in_executor(None, self._aggregator.add, look)
        for happened in events:
            self._on_event(happened)

    def _report_steps(self, metrics: Mapping[PeerId, MetricsRecord], trainers: Collection[PeerId]) -> None:
        now = asyncio.get_running_loop().time()
        self._trainers_seen |= dict.fromkeys(trainers, now)
        self._trainers_seen = {peer_id: at for peer_id, at in self._trainers_seen.items() if now - at < METRICS_S}
        believed = {
            peer_id: record
            for peer_id, record in metrics.items()
            if record.step <= self._leading_step + 1 and peer_id in self._trainers_seen
        }
        for made in self._steps.look(believed, trainers, now):
            logger.log(self._told_level, "Step #%d  loss = %.5f", made.step, made.loss, extra=SHOWN_LIVE)
            self._on_event(made)
            self._aggregator.made.append(made)

    def _report_heldout(self, measured: Mapping[PeerId, HeldoutRecord]) -> None:
        """Report the measurements of evaluators; the first one of each step."""
        for record in sorted(measured.values(), key=lambda record: record.step):
            if self._heldout_step < record.step <= self._leading_step:
                self._heldout_step = record.step
                logger.log(
                    self._told_level,
                    "Held-out loss %.4f, MLM accuracy %.1f%%, SOP accuracy %.1f%% at global step %d",
                    record.loss, 100 * record.mlm_accuracy, 100 * record.sop_accuracy, record.step, extra=SHOWN_LIVE,
                )  # fmt: skip
                self._aggregator.heldout[record.step] = record.loss
                self._on_event(HeldoutSeen(record.step, record.loss, record.mlm_accuracy, record.sop_accuracy))


def _all_at(leading: Position, present: Mapping[PeerId, SeenRecord], now: float) -> dict[PeerId, SeenRecord]:
    """The records, with peers one step off counted at ``leading``: after a step, the records change one by one."""
    counted_there = dict(present)
    for peer_id, seen in present.items():
        if abs(seen.record.position.step - leading.step) == 1:
            counted_there[peer_id] = gone_to(seen, leading, 0, now)
    return counted_there


def checked_refresh_s(refresh_s: float) -> float:
    """Check the longest time between two reads of a run.

    Raises:
        ConfigError: it is out of bounds.
    """
    if not MIN_REFRESH_S <= refresh_s <= LONGEST_REFRESH_S:
        raise ConfigError(
            f"refresh_period is {refresh_s}; it must be from {MIN_REFRESH_S} to {LONGEST_REFRESH_S:g} seconds, "
            "for example 30"
        )
    return refresh_s
