"""Reads what AWS says about a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from manyhands.cloud.plan import ROLE_TAG

ALIVE, ENDED = ("pending", "running"), "terminated"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine, as AWS describes it.

    Attributes:
        state: pending, running, stopping, stopped, shutting-down or terminated.
        reason: why it is not running; empty if AWS does not say.
    """

    machine_id: str
    role: str
    state: str
    machine_type: str
    zone: str
    is_spot: bool
    launched_at: datetime
    public_ip: str
    private_ip: str
    reason: str

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE


def machine_of(described: Mapping[str, Any], role: str = "") -> Machine:
    """A machine from AWS's description, which has no tags yet just after its start."""
    reason = described.get("StateReason", {}).get("Message", "") or described.get("StateTransitionReason", "")
    return Machine(
        machine_id=described["InstanceId"],
        role=role or tags_on(described).get(ROLE_TAG, "?"),
        state=described["State"]["Name"],
        machine_type=described["InstanceType"],
        zone=described.get("Placement", {}).get("AvailabilityZone", ""),
        is_spot=described.get("InstanceLifecycle") == "spot",
        launched_at=described["LaunchTime"],
        public_ip=described.get("PublicIpAddress", ""),
        private_ip=described.get("PrivateIpAddress", ""),
        reason=reason,
    )


def tags_on(described: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags", [])}


def counted_by_type(machines: Iterable[Machine]) -> str:
    """Machines by type and zone: ``2 x g4dn.xlarge in us-east-1a``."""
    numbers = Counter((one.machine_type, one.zone) for one in machines)
    return ", ".join(f"{number} x {one_type} in {zone}" for (one_type, zone), number in numbers.items())
