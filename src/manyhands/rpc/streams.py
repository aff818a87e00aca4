"""The streams that one endpoint has open, and what it has sent."""

from __future__ import annotations

from manyhands.transport.api import Stream


class OpenStreams:
    """Every stream of one endpoint, control and bulk, dialled and accepted, from its handshake to its end."""

    def __init__(self) -> None:
        self._streams: dict[Stream, None] = {}  # not a set: a simulation ends them in this order
        self._bytes_sent_before = 0

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent over all of them and over those that have ended, before encryption."""
        return self._bytes_sent_before + sum(stream.bytes_sent for stream in self._streams)

    def add(self, stream: Stream) -> None:
        """Count and, in the end, abort a stream."""
        self._streams[stream] = None

    def release(self, stream: Stream) -> None:
        """Abort a stream and hold it no longer. May be called twice."""
        stream.abort()
        if stream in self._streams:
            del self._streams[stream]
            self._bytes_sent_before += stream.bytes_sent

    def abort_all(self) -> None:
        """Abort what is open; whoever serves a stream releases it."""
        for stream in list(self._streams):
            stream.abort()
