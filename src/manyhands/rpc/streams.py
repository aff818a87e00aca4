"""The open streams of one endpoint, and the bytes sent over them."""

from __future__ import annotations

from manyhands.transport.api import Stream


class OpenStreams:
    """All streams of one endpoint, control and bulk, dialled and accepted, from handshake to end."""

    def __init__(self) -> None:
        self._streams: dict[Stream, None] = {}  # not a set, so that a simulation aborts them in this order
        self._bytes_sent_before = 0

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent over open and ended streams, before encryption."""
        return self._bytes_sent_before + sum(stream.bytes_sent for stream in self._streams)

    def add(self, stream: Stream) -> None:
        """Add a stream."""
        self._streams[stream] = None

    def release(self, stream: Stream) -> None:
        """Abort and remove a stream. May be called twice."""
        stream.abort()
        if stream in self._streams:
            del self._streams[stream]
            self._bytes_sent_before += stream.bytes_sent

    def abort_all(self) -> None:
        """Abort all open streams; the tasks that serve them release them."""
        for stream in list(self._streams):
            stream.abort()
