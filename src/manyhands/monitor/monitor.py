"""Watches a run without training; never imports torch."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection

from manyhands.base.errors import ConfigError, ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.base.run_id import checked_run_id
from manyhands.dht import StoredValue
from manyhands.monitor.events import Event, HeldoutSeen, ProgressMade
from manyhands.monitor.steps import SETTLED_S, CompleteSteps
from manyhands.optim.config import ProgressConfig
from manyhands.optim.manifest import read_manifest
from manyhands.optim.metrics import TTL_S, HeldoutRecord, MetricsRecord, read_metrics
from manyhands.optim.run.progress import Progress, ProgressLog, ProgressRecord, StrandedNotice, next_refresh_s, rank_of
from manyhands.optim.run.progress_reader import ProgressReader, View
from manyhands.optim.run.records import declare_run
from manyhands.peer import Peer
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

MAX_REFRESH_S = 3.0
MIN_REFRESH_S = 0.5
LONGEST_REFRESH_S = TTL_S
"""Lifetime of metrics."""


class WatchingReader(ProgressReader):
    """The progress records of a run, with that of this peer, if it trains as well."""

    def _look_at_own(self, record: ProgressRecord, stored: StoredValue, now: float) -> None:
        if (seen := self._seen_as(None, record, stored, now)) is not None:
            self._keep(self._endpoint.peer_id, seen)


class RunMonitor:
    """Reads the progress and the metrics of a run, and logs them.

    Args:
        on_event: called on the network thread with each :class:`manyhands.monitor.events.Event`; it must not block.
        refresh_s: longest time between two reads; reads are more frequent shortly before a global step.
        is_quiet: log warnings alone, for a process that logs the progress of the run itself.
    Attributes:
        looked_at: when it last read the run, in seconds since 1970; 0 before that.
    Raises:
        ConfigError: an argument is out of bounds.
    """

    def __init__(
        self,
        peer: Peer,
        run_id: str,
        on_event: Callable[[Event], None],
        *,
        refresh_s: float = MAX_REFRESH_S,
        is_quiet: bool = False,
    ) -> None:
        self.looked_at = 0.0
        self._told_level = logging.DEBUG if is_quiet else logging.INFO
        self._peer = peer
        self._run_id = checked_run_id(run_id)
        self._on_event = on_event
        self._refresh_s = checked_refresh_s(refresh_s)
        self._config = ProgressConfig(min_refresh_s=MIN_REFRESH_S, max_refresh_s=refresh_s, ttl_s=2 * LONGEST_REFRESH_S)
        self._tasks = TaskOwner("monitor")
        self._is_watched = True
        self._notice = StrandedNotice(run_id)
        self._steps = CompleteSteps()
        self._trainers_seen: dict[PeerId, float] = {}  # when last seen, also of those that have left
        self._leading_step = -1
        self._heldout_step = -1
        self._last_progress: Progress | None = None
        self._log = ProgressLog()

    async def start(self) -> None:
        """Start watching; ends when the peer is closed."""
        declare_run(self._peer.dht, self._run_id)
        self._reader = WatchingReader(self._peer.endpoint, self._peer.dht, self._run_id)
        self._tasks.spawn(self._watch_forever(), name="watching the run")
        self._peer.presence.on_close.append(self._tasks.close)

    async def _watch_forever(self) -> None:
        while True:
            delay_s = self._refresh_s
            try:
                delay_s = await self._look()
                self.looked_at = time.time()
            except ManyhandsError as error:
                logger.warning("cannot read the records of the run: %s; trying again", error)
            await asyncio.sleep(delay_s)

    async def _look(self) -> float:
        """Read and report once; returns the seconds until the next read."""
        await self._reader.refresh()
        trainers = self._reader.trainers()
        if not trainers:
            if self._is_watched:
                logger.log(self._told_level, "Found no active peers")
            self._is_watched = False
            await self._report_what_was_learnt(trainers)  # metrics of the last steps, also of peers that have left
            return 1.0
        self._is_watched = True
        self._tell_stranded()
        leading = max(trainers.values(), key=rank_of).position
        target = await self._target_batch_size()
        progress = View(self._reader.observed(), leading).outlook(None, target, asyncio.get_running_loop().time())
        delay_s = next_refresh_s(progress, self._config)
        if progress != self._last_progress:
            self._report_progress(leading.step, target, progress, delay_s)
            self._last_progress = progress
        if leading.step + 1 < self._steps.newest_step:  # the run was begun anew, or resumed from a checkpoint
            self._steps, self._heldout_step = CompleteSteps(), -1
        self._leading_step = leading.step
        await self._report_what_was_learnt(trainers)
        return min(delay_s, SETTLED_S) if self._steps.is_waiting else delay_s

    def _tell_stranded(self) -> None:
        """Warn if all trainers are behind firewalls: newcomers can join only through other peers, such as this one."""
        num_trainers = len(self._reader.trainers()) if self._reader.is_stranded() else 0
        self._notice.look(num_trainers, self._peer.addresses, asyncio.get_running_loop().time())

    async def _target_batch_size(self) -> int:
        signed = await read_manifest(self._peer.dht, self._run_id)
        return signed.manifest.target_batch_size if signed is not None else 0

    def _report_progress(self, step: int, target: int, progress: Progress, delay_s: float) -> None:
        if self._told_level == logging.INFO:
            self._log.tell(step, progress, delay_s, asyncio.get_running_loop().time())
        eta_s = progress.eta_s if math.isfinite(progress.eta_s) else None
        self._on_event(
            ProgressMade(
                step, progress.samples, target, progress.num_peers, round(progress.samples_per_second, 3), eta_s
            )
        )

    async def _report_what_was_learnt(self, trainers: Collection[PeerId]) -> None:
        if self._leading_step >= 0:  # otherwise no trainer has been seen yet
            await self._report_steps(trainers)
            await self._report_heldout()

    async def _report_steps(self, trainers: Collection[PeerId]) -> None:
        metrics = await read_metrics(self._peer.dht, self._run_id, MetricsRecord)
        now = asyncio.get_running_loop().time()
        self._trainers_seen |= dict.fromkeys(trainers, now)
        self._trainers_seen = {peer_id: at for peer_id, at in self._trainers_seen.items() if now - at < TTL_S}
        believed = {
            peer_id: record
            for peer_id, record in metrics.items()
            if record.step <= self._leading_step + 1 and peer_id in self._trainers_seen
        }
        for made in self._steps.look(believed, trainers, now):
            logger.log(self._told_level, "Step #%d  loss = %.5f", made.step, made.loss)
            self._on_event(made)

    async def _report_heldout(self) -> None:
        """Report the measurements of evaluators; of several for one step, the first counts."""
        measured = await read_metrics(self._peer.dht, self._run_id, HeldoutRecord)
        for record in sorted(measured.values(), key=lambda record: record.step):
            if self._heldout_step < record.step <= self._leading_step:
                self._heldout_step = record.step
                logger.log(
                    self._told_level,
                    "Held-out loss %.4f, MLM accuracy %.1f%%, SOP accuracy %.1f%% at global step %d",
                    record.loss, 100 * record.mlm_accuracy, 100 * record.sop_accuracy, record.step,
                )  # fmt: skip
                self._on_event(HeldoutSeen(record.step, record.loss, record.mlm_accuracy, record.sop_accuracy))


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
