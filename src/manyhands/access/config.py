"""The lifetimes and periods of a run's leases."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """Settings of leases: how long they are valid, and how often peers check and renew them.

    Attributes:
        lease_s: lifetime of a lease. Each peer asks for a new one after half of it.
        grace_s: time that an expired lease stays valid while no coordinator answers.
        max_clock_skew_s: largest difference between the clocks of two peers, the same as for the DHT.
        look_period_s: seconds between two reads of what the coordinators publish; a ban takes effect within this time.
        retry_s: seconds between two attempts to renew a lease while no coordinator answers.
    """

    lease_s: float = 12 * 3600.0
    grace_s: float = 24 * 3600.0
    max_clock_skew_s: float = 60.0
    look_period_s: float = 15.0
    retry_s: float = 300.0
