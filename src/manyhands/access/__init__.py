from manyhands.access.authorizer import Authorizer, Invited, Open
from manyhands.access.charter import Charter, Limits, SignedCharter
from manyhands.access.config import AccessConfig
from manyhands.access.coordinator import Coordinator
from manyhands.access.gate import RunGate
from manyhands.access.invitation import Invitation
from manyhands.access.lease import Lease, Role
from manyhands.access.members import Members

__all__ = [
    "AccessConfig",
    "Authorizer",
    "Charter",
    "Coordinator",
    "Invitation",
    "Invited",
    "Lease",
    "Limits",
    "Members",
    "Open",
    "Role",
    "RunGate",
    "SignedCharter",
]
