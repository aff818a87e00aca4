"""One control connection: calls in both directions, heartbeats, and a shutdown that loses no call."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerLost, ProtocolViolation, Timeout
from manyhands.base.rate import Buckets
from manyhands.rpc.calling import Calls
from manyhands.rpc.config import RpcConfig
from manyhands.rpc.frames import (
    CallFailure,
    Cancel,
    Drain,
    Frame,
    FrameReader,
    Goodbye,
    Ping,
    Pong,
    Request,
    Response,
    encode_frame,
    readable,
    send_frame,
)
from manyhands.rpc.method import Method, RequestT, ResponseT
from manyhands.rpc.serving import Served, Serving
from manyhands.rpc.ways import DIRECT, Way
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.api import ControlStream

logger = logging.getLogger(__name__)

FRAMES_AT_ONCE = 64
"""Frames of one peer that are handled before the event loop runs other tasks."""

DRAIN_TIMEOUT_S = 10.0
"""Time for the other end to agree to the shutdown, once all calls of this end are answered."""

_PING = encode_frame(Ping())
_PONG = encode_frame(Pong())
_DRAIN = encode_frame(Drain())


class ControlConnection:
    """Calls, answers and heartbeats over one stream.

    Args:
        stream: after its hello.
        is_client: the remote peer announces that it cannot be dialled.
        handlers: what this peer serves, by method name.
        counters: error counts, shared by the connections of one endpoint.
        is_dialled: whether this end dialled it.
        way: how the stream leads to the other end.

    Attributes:
        relays: whether the other end forwards bulk streams.
        lost: why it ended; None while it is open.
        is_retired: whether both ends agreed to close it.
        has_said_goodbye: whether the other end has closed it on purpose.
        on_drain: called when the other end asks to close it.
        last_used: loop time at which the last call began or was answered.
        look_at: loop time of the next check.
        rtt_s: the shortest round trip seen so far, in seconds; infinite before the first.
    """

    def __init__(
        self,
        stream: ControlStream,
        is_client: bool,
        handlers: Mapping[str, Served],
        config: RpcConfig,
        counters: Counter[str],
        call_rate: Buckets,
        *,
        is_dialled: bool,
        way: Way = DIRECT,
    ) -> None:
        self.remote = stream.remote
        self.remote_host = stream.remote_host
        self.is_client = is_client
        self.is_dialled = is_dialled
        self.way = way
        self.relays = False
        self.lost: PeerLost | None = None
        self.is_retired = False
        self.has_said_goodbye = False
        self.on_drain: Callable[[], None] = lambda: None
        self.rtt_s = math.inf
        self.last_used = asyncio.get_running_loop().time()
        self.look_at = 0.0
        self._stream = stream
        self._config = config
        self._counters = counters
        self._calls = Calls(stream, counters, self._drain_if_due)
        self._serving = Serving(stream, handlers, config.max_requests_per_connection, counters, call_rate, self._served)
        self._reader = FrameReader(stream.remote)
        if hasattr(stream, "hear"):
            stream.hear = self._hears
        self._pinged_at: float | None = None
        self._num_sent = stream.bytes_sent
        self._last_sent = self.last_used
        self._looked_at = self.last_used
        self._draining_since: float | None = None
        self._has_said_drain = False
        self._is_drained_there = False
        self._closing: asyncio.Task[None] | None = None
        self._tasks = TaskOwner(f"connection to {stream.remote}")

    @property
    def is_open(self) -> bool:
        """Whether new calls may begin."""
        return self.lost is None and self._draining_since is None

    @property
    def shortest_rtt_s(self) -> float:
        """The shortest round trip, in seconds, of pings, which a busy process delays, or as measured by the system.

        Through a relay, the system measures only the way to the relay.
        """
        return self.rtt_s if self.way.relay is not None else min(self.rtt_s, self._stream.rtt_s)

    @property
    def is_busy(self) -> bool:
        """Whether a call is running in either direction."""
        return bool(len(self._calls) or len(self._serving))

    async def run(self) -> PeerLost:
        """Serve the connection until it ends, and return the reason. Then call :meth:`close`."""
        if not self.is_dialled:  # the dialler has measured the round trip with its hello
            self._ping(asyncio.get_running_loop().time())
        try:
            while True:
                await self._handle(await self._stream.receive())
        except PeerLost as error:
            if self._closing is not None:
                await asyncio.wait([self._closing])  # deliver what was sent last
            self.is_retired = self.is_retired or self._is_agreed()
            self.end(error)
        except ProtocolViolation as error:
            self._counters["protocol_violations"] += 1
            logger.warning("%s; its connection is dropped", error)
            self.end(PeerLost(self.remote, str(error)))
        finally:
            self.end(PeerLost(self.remote, "the connection was closed here"))
        assert self.lost is not None
        return self.lost

    async def call(self, method: Method[RequestT, ResponseT], request: RequestT, timeout_s: float) -> ResponseT:
        """See :meth:`manyhands.rpc.Endpoint.call`."""
        self._check_lost()
        self._last_sent = asyncio.get_running_loop().time()
        try:
            return await self._calls.call(method, request, timeout_s)
        finally:
            self._used()

    def retire(self) -> None:
        """Begin no more calls; close the connection once those running at both ends are answered."""
        if self.is_open:
            self._draining_since = asyncio.get_running_loop().time()
            self._drain_if_due()

    async def goodbye(self, reason: str) -> None:
        """Tell the peer that this connection is closed on purpose, and close it."""
        if self.lost is None:
            try:
                async with time_limit(0.5, "saying goodbye"):
                    await send_frame(self._stream, Goodbye(reason))
            except (PeerLost, Timeout):
                pass
        await self._stream.close(0.5)

    async def close(self) -> None:
        """Stop all handlers and tasks of an ended connection; handlers may take time to clean up."""
        await self._serving.close()
        await self._tasks.close()

    def end(self, error: PeerLost) -> None:
        """Abort the connection; all its calls fail."""
        if self.lost is not None:
            return
        self.lost = error.with_traceback(None)  # a traceback would keep its frames alive as long as the connection
        self._stream.abort()
        self._calls.end(error)
        self._serving.end()

    def check_alive(self, now: float, heard_until: float) -> None:
        """Ping a peer that was silent for a period; abort the connection if the silence exceeds the timeout.

        Args:
            now: the loop's time.
            heard_until: silence before this instant does not count, as this process was not running.
        """
        period_s = self._config.heartbeat_period_s
        silence_s = now - max(self._stream.last_received, heard_until)
        if self._stream.bytes_sent != self._num_sent:  # at an unknown time since the last check
            self._num_sent = self._stream.bytes_sent
            self._last_sent = max(self._last_sent, self._looked_at, now - period_s / 2)
        if silence_s > self._config.heartbeat_timeout_s:
            self.end(PeerLost(self.remote, f"silent for {silence_s:.1f} s"))
        elif silence_s > period_s and self._pinged_at is None:
            self._ping(now)
        elif now - self._last_sent > period_s:  # a long message of the other end may block its pings
            self._send_now(_PONG)
        if self._draining_since is not None and now - self._draining_since > DRAIN_TIMEOUT_S and not self.is_busy:
            self._retired()  # the other end did not agree, but no call is running
        limit_s = period_s if self._pinged_at is None else self._config.heartbeat_timeout_s
        silent_at = self._stream.last_received + limit_s
        self.look_at = min(silent_at, self._last_sent + period_s) if self._draining_since is None else now
        self._looked_at = now

    def _check_lost(self) -> None:
        if self.lost is not None:
            raise PeerLost(self.remote, self.lost.reason)

    def _used(self) -> None:
        self.last_used = asyncio.get_running_loop().time()
        self._close_if_drained()

    def _served(self) -> None:
        self._used()
        self._note_sent()

    def _note_sent(self) -> None:
        """Note the time if bytes were sent."""
        if self._stream.bytes_sent != self._num_sent:
            self._last_sent = asyncio.get_running_loop().time()
            self._num_sent = self._stream.bytes_sent

    def _hears(self, data: bytes) -> bool:
        """Handle a message that is a single heartbeat, as most are on an idle connection; return whether it is one."""
        if data == _PONG and not self._reader.is_midway:
            self._ponged()
        elif data == _PING and not self._reader.is_midway:
            self._send_now(_PONG)
        else:
            return False
        return True

    async def _handle(self, data: bytes) -> None:
        if self._hears(data):
            return
        for number, frame in enumerate(self._reader.frames(data), 1):
            self._dispatch(frame)
            if number % FRAMES_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _dispatch(self, frame: Frame) -> None:
        if isinstance(frame, Request):
            self.last_used = asyncio.get_running_loop().time()
            self._serving.begin(frame)
        elif isinstance(frame, (Response, CallFailure)):
            self._calls.answered(frame)
        elif isinstance(frame, Cancel):
            self._serving.cancel(frame.id)
        elif isinstance(frame, Ping):
            self._send_now(_PONG)
        elif isinstance(frame, Pong):
            self._ponged()
        elif isinstance(frame, Drain):
            self._is_drained_there = True
            self.retire()
            self.on_drain()
            self._close_if_drained()
        elif isinstance(frame, Goodbye):
            self.has_said_goodbye = True
            raise PeerLost(self.remote, f"it closed the connection: {readable(frame.reason)}")
        else:
            raise ProtocolViolation(self.remote, f"sent an unexpected {type(frame).__name__} frame")

    # shutdown without losing calls

    def _drain_if_due(self) -> None:
        """Send the drain frame, once the last request was sent completely."""
        if self._draining_since is not None and not self._has_said_drain and not self._calls.num_sending:
            self._has_said_drain = True
            self._send_now(_DRAIN)

    def _is_agreed(self) -> bool:
        """Whether both ends have sent their drain frame, and all calls are answered."""
        return self._is_drained_there and self._has_said_drain and not self._calls.num_unanswered

    def _close_if_drained(self) -> None:
        if self._is_agreed() and not self.is_busy:
            self._retired()

    def _retired(self) -> None:
        if self.lost is None and self._closing is None:
            self.is_retired = True
            self._closing = self._tasks.spawn(self._stream.close(DRAIN_TIMEOUT_S), name="closing")

    # heartbeats

    def _ping(self, now: float) -> None:
        self._pinged_at = now
        self._send_now(_PING)

    def _ponged(self) -> None:
        if self._pinged_at is not None:
            self.rtt_s = min(self.rtt_s, asyncio.get_running_loop().time() - self._pinged_at)
            self._pinged_at = None

    def _send_now(self, frame: bytes) -> None:
        if self.lost is None:
            with suppress(PeerLost):  # the reader sees it too
                self._stream.send_now(frame)
                self._note_sent()
