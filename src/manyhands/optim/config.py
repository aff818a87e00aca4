"""How often the progress records are published and read; and numbers that ``manyhands plan`` needs without torch."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.base.arguments import check_number
from manyhands.base.errors import ConfigError

PARAMETERS_EVERY = 8
"""In a grid the parameters are averaged once in this many global steps; the update then starts from their mean."""
MANY_STEPS = 500
"""The number of inner steps from one average to the next that DiLoCo chose as a compromise of traffic and quality."""


@dataclass(frozen=True, kw_only=True)
class ProgressConfig:
    """How often a peer publishes and reads progress.

    Attributes:
        min_refresh_s: shortest time between two reads, and between two publications.
        max_refresh_s: longest time between two reads.
        ttl_s: lifetime of a record. The record of a dead peer counts for that long.
    """

    min_refresh_s: float = 0.5
    max_refresh_s: float = 10.0
    ttl_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("min_refresh_s", "max_refresh_s", "ttl_s"):
            check_number(name, getattr(self, name), example=getattr(ProgressConfig, name))
        if not self.min_refresh_s <= self.max_refresh_s < self.ttl_s:
            raise ConfigError(
                f"min_refresh_s={self.min_refresh_s}, max_refresh_s={self.max_refresh_s}, ttl_s={self.ttl_s} "
                "must rise in this order; for example 0.5, 10 and 30"
            )
