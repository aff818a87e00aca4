from manyhands.transport.api import ControlStream, Listener, OnStream, Stream, Transport
from manyhands.transport.memory import MemoryNetwork, MemoryTransport
from manyhands.transport.tls import TlsTransport

__all__ = [
    "ControlStream",
    "Listener",
    "MemoryNetwork",
    "MemoryTransport",
    "OnStream",
    "Stream",
    "TlsTransport",
    "Transport",
]
