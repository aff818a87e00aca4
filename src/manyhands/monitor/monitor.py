"""Welcomes peers and watches a run, without training; never imports torch."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping

from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import PeerId
from manyhands.base.run_id import checked_run_id
from manyhands.monitor.events import Event, ProgressMade, StepMade
from manyhands.optim.config import ProgressConfig
from manyhands.optim.firewalled import StrandedNotice
from manyhands.optim.metrics import MetricsRecord, read_metrics
from manyhands.optim.progress import Progress, aggregate, next_refresh_s, rank_of
from manyhands.optim.progress_log import ProgressLog
from manyhands.optim.progress_reader import ProgressReader
from manyhands.optim.run_manifest import read_manifests, run_manifest_of
from manyhands.optim.run_records import declare_run
from manyhands.peer import Peer
from manyhands.runtime import TaskOwner

logger = logging.getLogger(__name__)

MAX_REFRESH_S = 3.0


class RunMonitor:
    """Reads the progress and the metrics of a run, and logs them.

    Args:
        on_event: called on the network thread with each :class:`manyhands.monitor.events.Event`.
    """

    def __init__(self, peer: Peer, run_id: str, on_event: Callable[[Event], None]) -> None:
        self._peer = peer
        self._run_id = checked_run_id(run_id)
        self._on_event = on_event
        self._config = ProgressConfig(max_refresh_s=MAX_REFRESH_S)
        self._tasks = TaskOwner("monitor")
        self._is_watched = True
        self._notice = StrandedNotice(run_id)
        self._last_step = -1
        self._last_progress: Progress | None = None
        self._log = ProgressLog()

    async def start(self) -> None:
        """Begin to watch; ends when the peer is closed."""
        declare_run(self._peer.dht, self._run_id)
        self._reader = ProgressReader(self._peer.endpoint, self._peer.dht, self._run_id)
        self._tasks.spawn(self._watch_forever(), name="watching the run")
        self._peer.presence.on_close.append(self._tasks.close)

    async def _watch_forever(self) -> None:
        while True:
            delay_s = MAX_REFRESH_S
            try:
                delay_s = await self._look()
            except ManyhandsError as error:
                logger.warning("the run cannot be seen: %s", error)
            await asyncio.sleep(delay_s)

    async def _look(self) -> float:
        """Read and report once; returns when to look again, in seconds."""
        await self._reader.refresh()
        trainers = self._reader.trainers()
        if not trainers:
            if self._is_watched:
                logger.info("Found no active peers")
            self._is_watched = False
            return 1.0
        self._is_watched = True
        self._tell_stranded()
        leading = max(trainers.values(), key=rank_of).position
        target = await self._target_batch_size()
        progress = aggregate(None, trainers, leading, target, self._reader.reckoned_samples())
        delay_s = next_refresh_s(progress, self._config)
        if progress != self._last_progress:
            self._report_progress(leading.step, target, progress, delay_s)
            self._last_progress = progress
        await self._report_step()
        return delay_s

    def _tell_stranded(self) -> None:
        """Say it if all who train are behind firewalls: this peer knows where another one can join."""
        num_trainers = len(self._reader.trainers()) if self._reader.is_stranded() else 0
        self._notice.look(num_trainers, self._peer.addresses, asyncio.get_running_loop().time())

    async def _target_batch_size(self) -> int:
        manifest = run_manifest_of(await read_manifests(self._peer.dht, self._run_id))
        return manifest.target_batch_size if manifest is not None else 0

    def _report_progress(self, step: int, target: int, progress: Progress, delay_s: float) -> None:
        self._log.tell(step, progress, delay_s, asyncio.get_running_loop().time())
        eta_s = progress.eta_s if math.isfinite(progress.eta_s) else None
        self._on_event(
            ProgressMade(
                step, progress.samples, target, progress.num_peers, round(progress.samples_per_second, 3), eta_s
            )
        )

    async def _report_step(self) -> None:
        metrics = await read_metrics(self._peer.dht, self._run_id)
        step = max((record.step for record in metrics.values()), default=-1)
        if step > self._last_step:
            self._last_step = step
            made = sum_up(metrics, step)
            logger.info("Step #%d  loss = %.5f", made.step, made.loss)
            self._on_event(made)


def sum_up(metrics: Mapping[PeerId, MetricsRecord], step: int) -> StepMade:
    """Add up the metrics of all peers that have reported ``step``; the loss is the mean over their micro-batches."""
    records = [record for record in metrics.values() if record.step == step]
    mini_steps = sum(record.mini_steps for record in records)
    return StepMade(
        step=step,
        loss=sum(record.loss for record in records) / mini_steps if mini_steps else 0.0,
        alive_peers=len(records),
        samples=sum(record.samples_accumulated for record in records),
        samples_per_second=sum(record.samples_per_second for record in records),
    )
