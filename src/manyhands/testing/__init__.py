from manyhands.testing.faults import Fault, at, between, every
from manyhands.testing.host import Host
from manyhands.testing.network import SimNetwork, SimTransport
from manyhands.testing.trace import Trace
from manyhands.testing.virtual_loop import Deadlock, VirtualLoop, VirtualTimeout
from manyhands.testing.world import InvariantBroken, Leaked, World

__all__ = [
    "Deadlock",
    "Fault",
    "Host",
    "InvariantBroken",
    "Leaked",
    "SimNetwork",
    "SimTransport",
    "Trace",
    "VirtualLoop",
    "VirtualTimeout",
    "World",
    "at",
    "between",
    "every",
]
