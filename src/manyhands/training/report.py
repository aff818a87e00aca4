"""Reports each global step of a trainer to its log and to the monitors of the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from manyhands.averaging.timing import METRICS_S
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ManyhandsError, Timeout
from manyhands.base.text import counted
from manyhands.optim.metrics import (
    MAX_FAILURE,
    MAX_LEARNING_RATE,
    AccountRecord,
    Failure,
    MetricsRecord,
    Unit,
    checked_name,
    publish_metrics,
)
from manyhands.optim.optimizer import Optimizer
from manyhands.optim.run.progress import SHOWN_LIVE
from manyhands.rpc.frames import readable
from manyhands.runtime import TaskOwner
from manyhands.version import __version__

logger = logging.getLogger(__name__)

METRICS_TIMEOUT_S = 10.0
FAILURE_PERIOD_S = 5.0
"""Shortest time in seconds between two publications because of failures."""
LEAVE_TIMEOUT_S = 1.0
"""Longest wait in seconds for the last record while the peer closes, the same as for its last progress record."""


class AccountPublisher:
    """Publishes the account of one peer for monitors: at its start, after global steps and failures, and at its end.

    The training thread makes the record and does not wait; a task on the network thread publishes it.

    Args:
        name: under which the peer is shown; empty for none.
        device: the name of the device it computes on, as people read it.
        weight_unit: what ``weight`` of ``Optimizer.step`` counts, if it is given.
        ttl_s: lifetime of the published record.
    Raises:
        ConfigError: the name cannot be shown.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        name: str = "",
        device: str = "",
        ttl_s: float = METRICS_S,
        weight_unit: Unit = "items",
    ) -> None:
        self._optimizer = optimizer
        self._name = checked_name(name) if name else ""
        self._device = readable(device)[:80]
        self._ttl_s = ttl_s
        self._weight_unit = weight_unit
        self._bytes_before = optimizer.peer.presence.endpoint.bytes_sent
        self._bytes_of_step = 0
        self._told: Failure | None = None
        self._told_at = -FAILURE_PERIOD_S
        self._next: AccountRecord | None = None  # this and what follows is used on the network thread
        self._is_publishing = False
        self._tasks = TaskOwner("account")
        optimizer.peer.presence.on_close.append(self._leave)
        self._publish()  # so that monitors know its name before its first step, which may take long

    def step_made(self) -> None:
        """Publish the account after a global step."""
        sent = self._optimizer.peer.presence.endpoint.bytes_sent  # what is sent from now on counts for the next step
        self._bytes_of_step = sent - self._bytes_before
        self._bytes_before = sent
        self._publish()

    def look(self) -> None:
        """Publish the account if something has failed; call it after each batch."""
        is_told = self._optimizer.last_failure is self._told
        if not is_told and self._optimizer.peer.time() >= self._told_at + FAILURE_PERIOD_S:
            self._publish()

    def _publish(self) -> None:
        peer = self._optimizer.peer
        self._told = self._optimizer.last_failure
        self._told_at = peer.time()
        try:
            peer.run(self._hand_over(self._record()), METRICS_TIMEOUT_S, "handing over the account of this peer")
        except Timeout as error:  # only monitors need it
            logger.warning("%s", error)

    async def _hand_over(self, record: AccountRecord) -> None:
        self._next = record
        if not self._is_publishing and not self._tasks.is_closed:
            self._is_publishing = True
            self._tasks.spawn(self._publish_newest(), name="publishing")

    async def _publish_newest(self) -> None:
        try:
            while self._next is not None:
                record, self._next = self._next, None
                try:
                    async with time_limit(METRICS_TIMEOUT_S, "publishing the account of this peer"):
                        await self._store(record)
                except Timeout as error:
                    logger.warning("%s", error)
        finally:
            self._is_publishing = False

    async def _store(self, record: AccountRecord) -> None:
        """Publish a record; errors of the DHT are only logged."""
        presence = self._optimizer.peer.presence
        run_id = self._optimizer.manifest.run_id
        await publish_metrics(presence.dht, presence.peer_id, run_id, record, self._ttl_s)

    def _record(self, *, has_left: bool = False) -> AccountRecord:
        optimizer = self._optimizer
        counts = optimizer.statistics
        failure = optimizer.last_failure
        return AccountRecord(
            name=self._name,
            version=__version__,
            device=self._device,
            step=optimizer.global_step,
            learning_rate=self._learning_rate(),
            bytes_sent=self._bytes_of_step,
            samples_used=counts.samples_used,
            samples_dropped=counts.samples_dropped,
            rounds_committed=counts.rounds_committed,
            rounds_aborted=counts.rounds_aborted,
            states_loaded=counts.states_loaded,
            parameters_reloaded=counts.parameters_reloaded,
            failed_step=failure.step if failure is not None else 0,
            failure=readable(failure.reason)[:MAX_FAILURE] if failure is not None else "",
            has_left=has_left,
            unit=self._unit(),
            steps=optimizer.recent_steps.listed(),
        )

    def _learning_rate(self) -> float | None:
        """That of the first parameter group; None if it has none, or one that a record cannot hold."""
        groups = self._optimizer.param_groups
        if not groups or "lr" not in groups[0]:
            return None
        rate = float(groups[0]["lr"])
        return rate if 0 <= rate <= MAX_LEARNING_RATE else None

    def _unit(self) -> Unit | None:
        """The unit of the weights of batches; None until the first batch."""
        if self._optimizer.weighs_by_samples is None:
            return None
        return "samples" if self._optimizer.weighs_by_samples else self._weight_unit

    async def _leave(self) -> None:
        await self._tasks.close(LEAVE_TIMEOUT_S)
        try:
            async with time_limit(LEAVE_TIMEOUT_S, "telling the monitors that this peer leaves"):
                await self._store(self._record(has_left=True))
        except ManyhandsError as error:
            logger.debug("%s", error)


def report_step(
    optimizer: Optimizer,
    losses: Sequence[float],
    mean_loss: float,
    ttl_s: float = METRICS_S,
    account: AccountPublisher | None = None,
) -> None:
    """Log the global step that was reached, and publish the metrics of this peer.

    Args:
        losses: of the batches since the last step; only finite ones count, and without any no metrics are published.
        mean_loss: their mean, weighted by samples.
        ttl_s: lifetime of the published metrics.
        account: of this peer, published too.
    """
    contribution = optimizer.last_contribution
    speed = optimizer.samples_per_second
    logger.info("Step %d", optimizer.global_step, extra=SHOWN_LIVE)
    logger.info("Your current contribution: %s", counted(contribution, "sample"), extra=SHOWN_LIVE)
    if speed > 0:  # it is 0 if this peer joined right before the step and has computed no whole batch
        logger.info("Performance: %.3f samples/sec", speed, extra=SHOWN_LIVE)
    if account is not None:
        account.step_made()
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return
    logger.info("Local loss: %.5f", mean_loss, extra=SHOWN_LIVE)
    presence = optimizer.peer.presence
    record = MetricsRecord(optimizer.global_step, speed, contribution, sum(finite), len(finite))
    publication = publish_metrics(presence.dht, presence.peer_id, optimizer.manifest.run_id, record, ttl_s)
    try:
        optimizer.peer.run(publication, METRICS_TIMEOUT_S, "publishing metrics")
    except Timeout as error:  # metrics are optional
        logger.warning("%s", error)
