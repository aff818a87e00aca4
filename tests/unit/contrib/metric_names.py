"""The metrics that the dashboard and the alert rules in contrib/ are made of."""

from __future__ import annotations

METRICS = frozenset(
    {
        "manyhands_step",
        "manyhands_step_timestamp_seconds",
        "manyhands_looked_timestamp_seconds",
        "manyhands_loss",
        "manyhands_heldout_loss",
        "manyhands_samples_per_second",
        "manyhands_training_peers",
        "manyhands_peers",
        "manyhands_eta_seconds",
        "manyhands_committed_samples_total",
        "manyhands_rounds_aborted_total",
    }
)
"""All have the label ``run_id``; ``manyhands_peers`` also ``state``,
``manyhands_committed_samples_total`` also ``unit``."""
