"""Schemas of a run's DHT records; the nodes of its peers hold no others under its keys."""

from __future__ import annotations

from manyhands.dht import DhtNode, Schema
from manyhands.optim.manifest import manifest_key
from manyhands.optim.metrics import HeldoutRecord, MetricsRecord, heldout_key, metrics_key
from manyhands.optim.run.progress import MAX_TTL_S
from manyhands.optim.run.progress_reader import PROGRESS, progress_key

_SCHEMAS = {
    progress_key: PROGRESS,
    metrics_key: Schema(MetricsRecord, is_owned=True, max_ttl_s=MAX_TTL_S),
    heldout_key: Schema(HeldoutRecord, is_owned=True, max_ttl_s=MAX_TTL_S),
    manifest_key: Schema(bytes, is_owned=True, max_ttl_s=MAX_TTL_S),  # compressed; the reader checks the rest
}


def declare_run(dht: DhtNode, run_id: str) -> None:
    """Make the node of a peer of the run refuse, and not return, records that do not fit."""
    for key_of, schema in _SCHEMAS.items():
        dht.declare(key_of(run_id), schema)
