"""The times of a run's leases."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """How long leases count, and how often the peers of a run look after them.

    Attributes:
        lease_s: life of a lease. Each peer asks for a new one after half of it.
        grace_s: for so long an expired lease still counts while no coordinator answers.
        max_clock_skew_s: by how much the clocks of two peers may differ; as of the DHT.
        look_period_s: between two looks at what the coordinators publish, so a ban takes effect within it.
        retry_s: between two attempts to renew a lease when no coordinator answers.
    """

    lease_s: float = 12 * 3600.0
    grace_s: float = 24 * 3600.0
    max_clock_skew_s: float = 60.0
    look_period_s: float = 15.0
    retry_s: float = 300.0
