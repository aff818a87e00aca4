from manyhands.transport.api import ControlStream, Listener, OnStream, Stream, Transport
from manyhands.transport.tls import TlsTransport

__all__ = [
    "ControlStream",
    "Listener",
    "OnStream",
    "Stream",
    "TlsTransport",
    "Transport",
]
