"""Reports each global step of a trainer to its log and to the monitors of the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from manyhands.base.errors import Timeout
from manyhands.base.text import counted
from manyhands.optim.metrics import TTL_S, MetricsRecord, publish_metrics
from manyhands.optim.optimizer import Optimizer
from manyhands.optim.run.progress import SHOWN_LIVE

logger = logging.getLogger(__name__)

METRICS_TIMEOUT_S = 10.0


def report_step(optimizer: Optimizer, losses: Sequence[float], mean_loss: float, ttl_s: float = TTL_S) -> None:
    """Log the global step that was reached, and publish the metrics of this peer.

    Args:
        losses: of the batches since the last step; without any, nothing is published.
        mean_loss: their mean, weighted by samples.
        ttl_s: lifetime of the published metrics.
    """
    contribution, speed = optimizer.last_contribution, optimizer.samples_per_second
    logger.info("Step %d", optimizer.global_step, extra=SHOWN_LIVE)
    logger.info("Your current contribution: %s", counted(contribution, "sample"), extra=SHOWN_LIVE)
    logger.info("Performance: %.3f samples/sec", speed, extra=SHOWN_LIVE)
    if not losses:
        return
    logger.info("Local loss: %.5f", mean_loss, extra=SHOWN_LIVE)
    record = MetricsRecord(optimizer.global_step, speed, contribution, sum(losses), len(losses))
    presence, run_id = optimizer.peer.presence, optimizer.manifest.run_id
    publication = publish_metrics(presence.dht, presence.peer_id, run_id, record, ttl_s)
    try:
        optimizer.peer.run(publication, METRICS_TIMEOUT_S, "publishing metrics")
    except Timeout as error:  # metrics are optional
        logger.warning("%s", error)
