"""Bulk streams to a peer that cannot be dialled: it is asked over its control connection to dial back.

The requesting peer identifies the awaited connection by a token. The other peer dials it and sends the token in its
hello. After the welcome the two swap roles: the requesting peer says what the stream is for, as if it had dialled. This
cannot be abused to dial strangers: a peer only dials back the requesting peer, at an address where it has reached it
before.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec

from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerError, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc.connection import ControlConnection
from manyhands.rpc.dialling import Dialler, Opened, OpenOne
from manyhands.rpc.frames import MAX_STRIPES, Hello, Welcome, send_frame
from manyhands.rpc.method import Method
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.api import Stream

DIAL_BACK = "asked"
"""The purpose in the hello of a connection that is dialled back; the header is the token."""

MAX_OF_ONE_PEER = 16 * MAX_STRIPES
"""Connections that a peer dials back and serves concurrently for one requesting peer, which may relay for others."""

DIAL_TIMEOUT_S = 5.0
TOKEN_BYTES = 16


class DialRequest(msgspec.Struct, frozen=True):
    """Asks a peer to dial a bulk connection back and to send the token in its hello."""

    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class DialResponse(msgspec.Struct, frozen=True):
    """Confirms that the connection was dialled and welcomed."""


DIAL_BULK = Method("rpc.dial_bulk", DialRequest, DialResponse)


class DialBackStreams:
    """Both sides of the dial-back, for one endpoint.

    Args:
        way_back: returns the function that opens a connection to a peer that this one has reached; None if it has not.
        serve: handles a stream as its acceptor, and releases it at the end.
        rng: for tokens, which need only be unique: one is valid only for the peer that it was sent to.
    """

    def __init__(
        self,
        dialler: Dialler,
        tasks: TaskOwner,
        counters: Counter[str],
        way_back: Callable[[PeerId, float], OpenOne | None],
        hello: Callable[[str, bytes], Hello],
        serve: Callable[[Stream], Awaitable[None]],
        rng: random.Random,
    ) -> None:
        self._dialler = dialler
        self._tasks = tasks
        self._counters = counters
        self._way_back = way_back
        self._hello = hello
        self._serve = serve
        self._rng = rng
        self._awaited: dict[bytes, tuple[PeerId, asyncio.Future[Stream]]] = {}
        self._num_of: Counter[PeerId] = Counter()

    # the requesting peer

    async def open(self, connection: ControlConnection, hello: Hello, timeout_s: float) -> Opened:
        """Ask the other end of a control connection to dial back, and say what the stream is for.

        Raises:
            Unavailable: it did not dial in time.
            Refused: it refuses to dial, or refuses this stream.
        """
        remote = connection.remote
        token = self._rng.randbytes(TOKEN_BYTES)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        arrival = loop.create_future()
        self._awaited[token] = (remote, arrival)
        try:
            async with time_limit(timeout_s, f"for peer {remote}, which cannot be dialled, to dial a stream"):
                await connection.call(DIAL_BULK, DialRequest(token), timeout_s)
                await asyncio.wait([arrival])
            return await self._dialler.greet(arrival.result(), None, hello, deadline - loop.time())
        except BaseException:
            if arrival.done():
                arrival.result().abort()
            raise
        finally:
            del self._awaited[token]
            arrival.cancel()  # no effect if the connection has arrived

    async def arrived(self, stream: Stream, hello: Hello, welcome: Welcome) -> None:
        """Take a connection that was dialled back; returns when it is closed.

        Raises:
            Refused: no request waits for it.
        """
        remote, arrival = self._awaited.get(hello.header, (None, None))
        if arrival is None or remote != stream.remote or arrival.done():
            raise Refused(stream.remote, "not_asked", "no request waits for this stream")
        await send_frame(stream, welcome)
        if not arrival.done():
            arrival.set_result(stream)
            await stream.wait_closed()  # closed by the requesting peer or the other end

    # the peer that dials back

    async def on_dial(self, remote: PeerId, request: DialRequest) -> DialResponse:
        """Dial back, and serve the connection as if the other peer had dialled it."""
        open_one = self._way_back(remote, DIAL_TIMEOUT_S)
        if open_one is None:
            self._counters["refused_asked_streams"] += 1
            raise Refused(remote, "not_reached", "this peer has never reached the requesting peer at any address")
        if self._num_of[remote] >= MAX_OF_ONE_PEER:
            self._counters["refused_asked_streams"] += 1
            raise Refused(remote, "busy", f"this peer already serves {MAX_OF_ONE_PEER} streams that it dialled back")
        self._num_of[remote] += 1
        try:
            opened = await open_one(self._hello(DIAL_BACK, request.token))
        except BaseException as error:
            self._done_with(remote)
            if isinstance(error, PeerError):  # the requesting peer no longer wants the connection
                raise Unavailable(str(error)) from error
            raise
        self._counters["asked_streams"] += 1
        self._tasks.spawn(self._serve_for(remote, opened.stream), name=f"stream dialled back to {remote}")
        return DialResponse()

    async def _serve_for(self, remote: PeerId, stream: Stream) -> None:
        try:
            await self._serve(stream)
        finally:
            self._done_with(remote)

    def _done_with(self, remote: PeerId) -> None:
        self._num_of[remote] -= 1
        if not self._num_of[remote]:
            del self._num_of[remote]
