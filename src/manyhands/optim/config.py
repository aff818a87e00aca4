"""Periods of the progress records."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ProgressConfig:
    """How often a peer publishes and reads progress.

    Attributes:
        min_refresh_s: records are published and read at most this often.
        max_refresh_s: and read at least this often.
        default_refresh_s: how often to read while no peer's speed is known.
        expected_drift_peers: so many newcomers may appear before the next reading ...
        expected_drift_rate: ... or this share of the peers, which makes the target come sooner than predicted.
        ttl_s: lifetime of a record after its last renewal; then a dead peer is forgotten.
    """

    min_refresh_s: float = 0.5
    max_refresh_s: float = 10.0
    default_refresh_s: float = 1.0
    expected_drift_peers: float = 3.0
    expected_drift_rate: float = 0.2
    ttl_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.min_refresh_s <= self.max_refresh_s < self.ttl_s:
            raise ConfigError(
                f"min_refresh_s={self.min_refresh_s}, max_refresh_s={self.max_refresh_s}, ttl_s={self.ttl_s} "
                "must rise in this order; for example 0.5, 10 and 30"
            )
