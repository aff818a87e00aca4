"""What goes in and out at a peer, for tests that watch it there, change it, or cut the peer off."""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from weakref import WeakSet

from manyhands.base.address import Address
from manyhands.base.errors import DialFailed, DialReason
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint, Method
from manyhands.rpc.bulk import BulkAcceptor
from manyhands.transport import ControlStream, Stream, Transport
from manyhands.transport.api import Listener, OnStream, Pay, Port

Handler = Callable[[PeerId, Any], Any]
"""``handler(remote, request)`` returns the answer, or an awaitable of it."""
Change = Callable[[Any, Callable[[Any], Awaitable[Any]]], Awaitable[Any]]
"""``change(request, call)`` makes a call in place of ``call(request)``."""


class Wire:
    """A transport that knows its streams, and can cut all of them at once, as the death of the process does.

    Attributes:
        transport: opens the connections.
        streams: those that something refers to still.
        dialled: of these, those that were dialled here.
    """

    def __init__(self, transport: Transport) -> None:
        self.identity = transport.identity
        self.streams: WeakSet[Stream] = WeakSet()
        self.dialled: WeakSet[Stream] = WeakSet()
        self.transport = transport
        self._listeners: list[Listener] = []
        self._is_cut = False

    async def dial(self, address: Address, timeout_s: float) -> ControlStream:
        stream = await self.transport.dial(address, timeout_s)
        self._note(address, stream)
        return stream

    async def dial_bulk(self, address: Address, timeout_s: float) -> Stream:
        stream = await self.transport.dial_bulk(address, timeout_s)
        self._note(address, stream)
        return stream

    def _note(self, address: Address, stream: Stream) -> None:
        if self._is_cut:
            stream.abort()
            raise DialFailed(str(address), DialReason.REFUSED)
        self.streams.add(stream)
        self.dialled.add(stream)

    async def listen(self, address: Address, on_stream: OnStream) -> Listener:
        async def note(stream: Stream) -> None:
            self.streams.add(stream)
            await on_stream(stream)

        listener = await self.transport.listen(address, note)
        self._listeners.append(listener)
        return listener

    async def dial_through(self, carrier: Stream, peer_id: PeerId, timeout_s: float, *, is_bulk: bool) -> Stream:
        stream = await self.transport.dial_through(carrier, peer_id, timeout_s, is_bulk=is_bulk)
        self.streams.add(stream)
        return stream

    async def accept_through(self, carrier: Stream, timeout_s: float) -> Stream:
        stream = await self.transport.accept_through(carrier, timeout_s)
        self.streams.add(stream)
        return stream

    async def forward(self, one: Stream, other: Stream, chunk_bytes: int, pay: Pay) -> None:
        await self.transport.forward(one, other, chunk_bytes, pay)

    def public_ip6(self) -> str:
        return self.transport.public_ip6()

    def take_port(self) -> Port:
        return self.transport.take_port()

    async def dial_from(
        self, port: Port, places: Sequence[Address], peer_id: PeerId, timeout_s: float, *, is_bulk: bool
    ) -> Stream:
        stream = await self.transport.dial_from(port, places, peer_id, timeout_s, is_bulk=is_bulk)
        self.streams.add(stream)
        return stream

    async def accept_from(self, port: Port, places: Sequence[Address], peer_id: PeerId, timeout_s: float) -> Stream:
        stream = await self.transport.accept_from(port, places, peer_id, timeout_s)
        self.streams.add(stream)
        return stream

    def close(self) -> None:
        self.transport.close()

    def abort_all(self) -> None:
        """End all streams."""
        for stream in list(self.streams):
            stream.abort()

    async def cut(self) -> None:
        """End all streams, and accept and dial no more. Nothing is said to anybody."""
        self._is_cut = True
        self.abort_all()
        for listener in self._listeners:
            await listener.close()

    async def num_open(self, *, only_dialled: bool = False) -> int:
        """Number of streams that neither end has closed."""
        streams = self.dialled if only_dialled else self.streams
        closing = [asyncio.ensure_future(stream.wait_closed()) for stream in list(streams)]
        for _ in range(8):  # more turns of the loop than one that is closed takes
            await asyncio.sleep(0)
        num_open = sum(not task.done() for task in closing)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        return num_open


class WatchedEndpoint(Endpoint):
    """An endpoint at which a test sees the calls, makes and answers them otherwise, and can cut all connections.

    Attributes:
        wire: its transport.
        asked: by the name of the method on the wire, who has asked this peer of late, and what.
        handlers: by the name of the method on the wire, what answers here.
        changes: by the name of the method on the wire, what makes the calls of this peer.
        acceptors: by kind on the wire, what accepts bulk streams here.
        opened, accepted: its bulk streams, except those that nothing refers to any more.
        num_opened: bulk streams that it has opened so far.
    """

    def __init__(self, transport: Transport, **options: Any) -> None:
        self.wire = Wire(transport)
        self.asked: defaultdict[str, deque[tuple[PeerId, Any]]] = defaultdict(lambda: deque(maxlen=100))
        self.handlers: dict[str, Handler] = {}
        self.changes: dict[str, Change] = {}
        self.acceptors: dict[str, BulkAcceptor] = {}
        self.opened: WeakSet[Stream] = WeakSet()
        self.accepted: WeakSet[Stream] = WeakSet()
        self.num_opened = 0
        super().__init__(self.wire, **options)

    def handle(self, method: Method[Any, Any], handler: Handler, guard: Any = None) -> None:
        self.handlers[method.name] = handler
        asked = self.asked[method.name]

        async def answer(remote: PeerId, request: Any) -> Any:
            asked.append((remote, request))
            return await handler(remote, request)

        def answer_at_once(remote: PeerId, request: Any) -> Any:
            asked.append((remote, request))
            return handler(remote, request)

        super().handle(method, answer if inspect.iscoroutinefunction(handler) else answer_at_once, guard)

    def accept_bulk(self, kind: str, acceptor: BulkAcceptor, guard: Any = None) -> None:
        async def accept(remote: PeerId, header: bytes, stream: Stream) -> None:
            self.accepted.add(stream)
            await acceptor(remote, header, stream)

        self.acceptors[kind] = acceptor
        super().accept_bulk(kind, accept, guard)

    async def open_bulk(self, *arguments: Any, **options: Any) -> Stream:
        stream = await super().open_bulk(*arguments, **options)
        self.opened.add(stream)
        self.num_opened += 1
        return stream

    async def call(self, peer_id: PeerId, method: Method[Any, Any], request: Any, timeout_s: float = 5.0) -> Any:
        async def call(request: Any) -> Any:
            return await super(WatchedEndpoint, self).call(peer_id, method, request, timeout_s)

        change = self.changes.get(method.name)
        return await call(request) if change is None else await change(request, call)
