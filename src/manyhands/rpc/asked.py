"""Bulk streams to a peer that nobody can dial: it is asked over its control connection, and dials them itself.

The peer that asks names the connection that it waits for by a token. The asked one dials it, says the token in its
hello, and from the welcome on the two have changed roles: the peer that asked says what the stream is for, as if it had
dialled it. Nobody has another peer dial a stranger like that: the asked one dials nobody but the asking peer, where it
has reached it before.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import msgspec

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import PeerError, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc.connection import ControlConnection
from manyhands.rpc.dialling import Dialler, Opened
from manyhands.rpc.frames import MAX_STRIPES, Hello, Welcome, send_frame
from manyhands.rpc.method import Method
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.api import Stream

ASKED = "asked"
"""What the hello of such a connection says that it is for; its header is the token."""

MAX_OF_ONE_PEER = 2 * MAX_STRIPES
"""Connections that a peer dials and serves at once for another one that asks."""

DIAL_TIMEOUT_S = 5.0
TOKEN_BYTES = 16


class DialRequest(msgspec.Struct, frozen=True):
    """Please dial me a bulk connection, and name it so."""

    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class DialResponse(msgspec.Struct, frozen=True):
    """It was dialled, and welcomed."""


DIAL_BULK = Method("rpc.dial_bulk", DialRequest, DialResponse)


class AskedStreams:
    """Both sides of it, for one endpoint.

    Args:
        reached_at: where this peer has reached another one.
        serve: what to do with a stream once this peer is its acceptor; releases it in the end.
        rng: for tokens, which differ; that of another peer is of no use to a peer.
    """

    def __init__(
        self,
        dialler: Dialler,
        tasks: TaskOwner,
        counters: Counter[str],
        reached_at: Callable[[PeerId], Sequence[Address]],
        hello: Callable[[str, bytes], Hello],
        serve: Callable[[Stream], Awaitable[None]],
        rng: random.Random,
    ) -> None:
        self._dialler = dialler
        self._tasks = tasks
        self._counters = counters
        self._reached_at = reached_at
        self._hello = hello
        self._serve = serve
        self._rng = rng
        self._awaited: dict[bytes, tuple[PeerId, asyncio.Future[Stream]]] = {}
        self._num_of: Counter[PeerId] = Counter()

    # the peer that asks

    async def open(self, connection: ControlConnection, hello: Hello, timeout_s: float) -> Opened:
        """Have the other end of a control connection dial, and say what the stream is for.

        Raises:
            Unavailable: it does not, in time.
            Refused: it does not dial, or does not take this stream.
        """
        remote, token = connection.remote, self._rng.randbytes(TOKEN_BYTES)
        loop = asyncio.get_running_loop()
        deadline, arrival = loop.time() + timeout_s, loop.create_future()
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
            arrival.cancel()  # nothing, if the connection is there

    async def arrived(self, stream: Stream, hello: Hello, welcome: Welcome) -> None:
        """A connection that was asked for, perhaps; returns when it is closed.

        Raises:
            Refused: nobody waits for it.
        """
        remote, arrival = self._awaited.get(hello.header, (None, None))
        if arrival is None or remote != stream.remote or arrival.done():
            raise Refused(stream.remote, "not_asked", "nobody waits for this stream")
        await send_frame(stream, welcome)
        if not arrival.done():
            arrival.set_result(stream)
            await stream.wait_closed()  # the peer that asked closes it, or the other end

    # the peer that is asked

    async def on_dial(self, remote: PeerId, request: DialRequest) -> DialResponse:
        """Dial a connection for a peer, and serve it as if that one had dialled."""
        addresses = self._reached_at(remote)
        if not addresses:
            self._counters["refused_asked_streams"] += 1
            raise Refused(remote, "not_reached", "this peer has not reached the asking one anywhere")
        if self._num_of[remote] >= MAX_OF_ONE_PEER:
            self._counters["refused_asked_streams"] += 1
            raise Refused(remote, "busy", f"this peer serves {MAX_OF_ONE_PEER} streams that were asked for already")
        self._num_of[remote] += 1
        try:
            opened = await self._dialler.open(addresses, self._hello(ASKED, request.token), DIAL_TIMEOUT_S)
        except BaseException as error:
            self._done_with(remote)
            if isinstance(error, PeerError):  # it does not want any more what it has asked for
                raise Unavailable(str(error)) from error
            raise
        self._counters["asked_streams"] += 1
        self._tasks.spawn(self._serve_for(remote, opened.stream), name=f"a stream that {remote} asked for")
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
