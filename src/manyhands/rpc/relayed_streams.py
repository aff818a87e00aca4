"""Streams to a peer that cannot be dialled from here: a relay, to which both are connected, forwards their bytes.

The two ends run TLS with each other through the relay, so it can neither read nor change what it forwards. For the
endpoints, a relayed stream is like any other after its handshake.

=====  ===============  =================================================================================
order  from, to         message
=====  ===============  =================================================================================
1      caller, relay    the hello of a bulk stream, with the purpose ``relay`` and a :class:`RelayRequest`
2      relay, target    the hello of a bulk stream, with the purpose ``relayed``; a target in client mode is
                        asked to dial back, as for any stream
3      target, relay    its welcome, after which it waits for a TLS handshake on the same connection
4      relay, caller    its welcome, or why not; from then on the relay forwards
5      caller, target   the TLS handshake of the stream, its hello, and what it is for
=====  ===============  =================================================================================

Any peer relays the control streams of two peers that are connected to it: they are small, and share a fixed rate. Bulk
streams are only relayed by volunteers (``relay_mbit_s``). The callers at each IP address get an equal part of the rate.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from manyhands.base.errors import PeerError, ProtocolViolation, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.structs import make_ready
from manyhands.rpc.config import RpcConfig
from manyhands.rpc.dialling import Dialler, Opened
from manyhands.rpc.frames import CONTROL, UNREADABLE, Hello, Welcome, send_frame
from manyhands.rpc.streams import OpenStreams
from manyhands.rpc.upload_cap import UploadCap
from manyhands.rpc.ways import Way, relayed_by
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport.admission import source_of
from manyhands.transport.api import Stream, Transport

RELAY = "relay"
"""The purpose in the hello from a caller to a relay."""

RELAYED = "relayed"
"""The purpose in the hello from a relay to the target."""

RELAYS_ASKED = 3
"""The largest number of relays that are asked for one stream."""

FAILED_S = 600.0
"""Seconds for which a relay that has failed is asked after all others."""

MAX_FAILED = 64
"""Relays of which this peer remembers when they failed last."""

OPEN_TIMEOUT_S = 2.0
"""Time for a relay to reach the target. Less than callers wait, so that they learn the reason."""

MAX_STREAMS = 1024
"""Streams that this peer forwards at a time as a relay."""

MAX_OF_ONE_SOURCE = 128
"""Streams that this peer forwards at a time for callers at one IP address, or in one /64 of IPv6."""

MAX_OF_ONE_PAIR = 20
"""Streams that this peer forwards at a time from one caller to one target: two striped bulk streams and a few more."""

CONTROL_MBIT_S = 8.0
"""Megabits per second of all relayed control streams together."""

CONTROL_CHUNK_BYTES = 4 * 1024
BULK_CHUNK_BYTES = 64 * 1024
"""Most bytes that the relay holds in each direction of a stream, and forwards at a time."""


Asking: TypeAlias = asyncio.Task[Stream | Unavailable | PeerError]


class RelayRequest(msgspec.Struct, frozen=True):
    """The header of a stream to a relay.

    Attributes:
        target: the peer to be reached.
        is_bulk: whether the stream is for bulk data.
    """

    target: Annotated[PeerId, msgspec.Meta(max_length=64)]
    is_bulk: bool


make_ready(RelayRequest)


class Forwarded(NamedTuple):
    """A stream that this peer relays.

    Attributes:
        source: the IP address of the caller, or its /64 of IPv6.
    """

    source: str
    caller: PeerId
    target: PeerId


class RelayedStreams:
    """The three roles of one endpoint: caller, relay and target.

    Args:
        open_to: opens a bulk stream with a hello to a peer, within some seconds.
        serve: serves a stream for the purpose in its hello, and releases it at the end; its second argument is the
            way to the other peer.
        is_near: whether a peer is connected without a relay, or was when it was dialled last.
        is_allowed: whether this peer relays for a peer.
        is_named: whether a peer is a volunteer that the user named.
    """

    def __init__(
        self,
        transport: Transport,
        dialler: Dialler,
        streams: OpenStreams,
        tasks: TaskOwner,
        counters: Counter[str],
        config: RpcConfig,
        open_to: Callable[[PeerId, Hello, float], Awaitable[Opened]],
        serve: Callable[[Stream, Way], Awaitable[None]],
        is_near: Callable[[PeerId], bool],
        is_allowed: Callable[[PeerId], bool],
        is_named: Callable[[PeerId], bool],
    ) -> None:
        self._transport = transport
        self._dialler = dialler
        self._streams = streams
        self._tasks = tasks
        self._counters = counters
        self._config = config
        self._open_to = open_to
        self._serve = serve
        self._is_near = is_near
        self._is_allowed = is_allowed
        self._is_named = is_named
        self._forwarded: list[Forwarded] = []
        self._failed_at: dict[PeerId, float] = {}  # loop time, by relay
        self._control_cap = UploadCap(CONTROL_MBIT_S)
        self._bulk_cap = UploadCap(config.relay_mbit_s) if config.relay_mbit_s is not None else None

    # the caller

    def failed(self, relay: PeerId) -> None:
        """Note that a stream through a relay was not open in time, was lost, or lacked data: others come before it."""
        self._failed_at.pop(relay, None)
        self._failed_at[relay] = asyncio.get_running_loop().time()
        if len(self._failed_at) > MAX_FAILED:
            del self._failed_at[next(iter(self._failed_at))]

    async def open(self, relays: Sequence[PeerId], target: PeerId, hello: Hello, timeout_s: float) -> Opened:
        """Open a stream through the first of some relays that reaches the target.

        Each has a head start of an equal part of the time before the next is asked too: a silent one leaves time for
        the others, and a slow one goes on. Once one has failed, volunteers that the user named come first: the others
        may all belong to one attacker. Those that failed lately come last, in the order in which they failed.

        Returns:
            The stream; its way names the relay.
        Raises:
            Unavailable: with the reason of each relay.
            Refused: the target refuses this stream.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        untried = self._in_order(relays)[:RELAYS_ASKED]
        head_start_s = timeout_s / max(len(untried), 1)
        asked: dict[Asking, tuple[PeerId, float]] = {}  # those that have not answered: which relay, and since when
        reasons: list[str] = []
        try:
            while untried or asked:
                self._dialler.check_open()
                if untried:
                    relay = untried.pop(0)
                    asking = self._reach_through(relay, target, deadline, is_bulk=hello.purpose != CONTROL)
                    asked[self._tasks.spawn(asking, name=f"asking relay {relay}")] = relay, loop.time()
                limit_s = head_start_s if untried else None  # the last one has a limit of its own
                done, _ = await asyncio.wait(asked, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                self._dialler.check_open()
                for task in [task for task in asked if task in done]:
                    relay, _ = asked.pop(task)
                    left_s = deadline - loop.time()
                    within_s = min(left_s, head_start_s) if untried or asked else left_s
                    stream = task.result()
                    try:
                        if isinstance(stream, Exception):
                            raise stream
                        # one at a time, as the target acts on each hello
                        opened = await self._dialler.greet(stream, None, hello, within_s)
                    except Refused as refusal:
                        if refusal.peer_id == target:
                            raise
                        reasons.append(f"relay {relay}: {refusal}")
                    except (Unavailable, PeerError) as error:
                        self.failed(relay)
                        reasons.append(f"relay {relay}: {error}")
                    else:
                        for silent, since in asked.values():
                            if loop.time() >= since + head_start_s:
                                self.failed(silent)
                        return replace(opened, way=relayed_by(relay))
            raise Unavailable("; ".join(reasons) or f"no relay is connected that could reach peer {target}")
        finally:
            for task in asked:
                self._tasks.cancel(task)
                task.add_done_callback(self._drop)

    async def _reach_through(
        self, relay: PeerId, target: PeerId, deadline: float, *, is_bulk: bool
    ) -> Stream | Unavailable | PeerError:
        """Return a stream through a relay, or why there is none as a value, since the caller may have given up."""
        loop = asyncio.get_running_loop()
        try:
            header = msgspec.msgpack.encode(RelayRequest(target, is_bulk))
            carrier = (await self._open_to(relay, Hello(RELAY, header=header), deadline - loop.time())).stream
            try:
                stream = await self._transport.dial_through(carrier, target, deadline - loop.time(), is_bulk=is_bulk)
            except BaseException:
                self._streams.release(carrier)
                raise
            if stream is not carrier:
                self._streams.release(carrier)
            self._streams.add(stream)
        except (Unavailable, PeerError) as error:
            return error
        return stream

    def _drop(self, task: Asking) -> None:
        """Release a stream that came too late."""
        if not task.cancelled() and not isinstance(stream := task.result(), Exception):
            self._streams.release(stream)

    def _in_order(self, relays: Sequence[PeerId]) -> list[PeerId]:
        if any(self._last_failure(relay) > -math.inf for relay in self._failed_at):
            relays = sorted(relays, key=lambda relay: not self._is_named(relay))
        return sorted(relays, key=self._last_failure)

    def _last_failure(self, relay: PeerId) -> float:
        """When a relay has failed last (loop time); minus infinity if that is long ago, or it has not."""
        at = self._failed_at.get(relay, -math.inf)
        return at if asyncio.get_running_loop().time() - at < FAILED_S else -math.inf

    # the relay

    async def asked(self, stream: Stream, hello: Hello, welcome: Welcome) -> None:
        """Forward between a caller and its target, until both have closed the stream.

        Raises:
            Refused: this peer does not relay this stream.
            ProtocolViolation: the request cannot be read.
        """
        caller = stream.remote
        try:
            request = msgspec.msgpack.decode(hello.header, type=RelayRequest)
        except UNREADABLE as error:
            raise ProtocolViolation(caller, f"sent a request for a relay that cannot be read: {error}") from error
        one = Forwarded(source_of(stream.remote_host), caller, request.target)
        self._check(one, is_bulk=request.is_bulk)
        self._forwarded.append(one)
        try:
            await self._forward(stream, request, welcome)
        finally:
            self._forwarded.remove(one)

    async def _forward(self, stream: Stream, request: RelayRequest, welcome: Welcome) -> None:
        try:
            opened = await self._open_to(request.target, Hello(RELAYED), OPEN_TIMEOUT_S)
        except (Unavailable, PeerError) as error:
            raise Refused(stream.remote, "not_reached", f"peer {request.target} does not answer: {error}") from error
        self._counters["relayed_streams"] += 1
        try:
            await send_frame(stream, welcome)
            cap, chunk_bytes = self._control_cap, CONTROL_CHUNK_BYTES
            if request.is_bulk and self._bulk_cap is not None:
                cap, chunk_bytes = self._bulk_cap, BULK_CHUNK_BYTES
            # peer ids cost nothing, so the addresses of callers take turns, and at one address the pairs of peers
            turns = cap.turn_of(source_of(stream.remote_host)), cap.turn_of(f"{stream.remote} {request.target}")
            await self._transport.forward(stream, opened.stream, chunk_bytes, functools.partial(self._pay, cap, *turns))
        finally:
            self._streams.release(opened.stream)

    def _check(self, one: Forwarded, *, is_bulk: bool) -> None:
        num_of_source = sum(other.source == one.source for other in self._forwarded)
        num_of_pair = self._forwarded.count(one)
        code = message = ""
        if not (self._is_allowed(one.caller) and self._is_allowed(one.target)):
            code = "not_allowed"
            message = "this peer is in a run by invitation, and relays for its members only"
        elif not self._is_near(one.target) or one.target == one.caller:
            code = "not_connected"
            message = f"this peer is not connected to peer {one.target}"
        elif is_bulk and self._bulk_cap is None:
            code = "no_relay"
            message = "this peer relays no bulk data; started with --relay it would"
        elif (
            len(self._forwarded) >= MAX_STREAMS or num_of_source >= MAX_OF_ONE_SOURCE or num_of_pair >= MAX_OF_ONE_PAIR
        ):
            code = "busy"
            message = f"this peer relays {len(self._forwarded)} streams already, {num_of_pair} for this pair"
        if code:
            self._counters["refused_relays"] += 1
            raise Refused(one.caller, code, message)

    async def _pay(self, cap: UploadCap, turn: asyncio.Lock, turn_of_pair: asyncio.Lock, num_bytes: int) -> None:
        self._counters["relayed_bytes"] += num_bytes
        async with turn_of_pair:
            await cap.wait_for(num_bytes, turn)

    # the target

    async def arrived(self, stream: Stream, welcome: Welcome) -> None:
        """Serve a stream that a relay forwards.

        Raises:
            Unavailable: no peer has proven its identity in time.
        """
        relay = stream.remote
        await send_frame(stream, welcome)
        relayed = await self._transport.accept_through(stream, self._config.hello_timeout_s)
        self._streams.add(relayed)
        await self._serve(relayed, relayed_by(relay))
