"""grpc.aio over mutual TLS, without protobuf: messages are raw bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import msgspec
from _certificates import NAME, Credentials
from _link import ECHO_BYTES, MIB, PATIENCE_S, Link, LinkClosed, Plan, Serve, Sink

PIECE_BYTES = MIB
OPTIONS = [
    ("grpc.max_send_message_length", 16 * MIB),
    ("grpc.max_receive_message_length", 16 * MIB),
    ("grpc.ssl_target_name_override", NAME),
    ("grpc.use_local_subchannel_pool", 1),  # otherwise all channels of a process share connections
]
SERVICE = "benchmark"


def _cut(payload: bytes) -> Sequence[bytes]:
    return [payload[start : start + PIECE_BYTES] for start in range(0, len(payload), PIECE_BYTES)]


class CallLink:
    """A bidirectional streaming call; the server ends it after the client has ended its direction."""

    def __init__(self, call: Any, done_writing: Any = None) -> None:
        self._call = call
        self._done_writing = done_writing

    async def send(self, piece: bytes) -> None:
        try:
            await self._call.write(piece)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise LinkClosed from error

    async def receive(self, sink: Sink) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                sink(memoryview(message))
        except grpc.RpcError:
            return

    async def close(self) -> None:
        if self._done_writing is not None:
            await self._done_writing()


class Server:
    """Listens; echoes, or serves links."""

    def __init__(self, credentials: Credentials) -> None:
        self.cut = _cut
        self._credentials = grpc.ssl_server_credentials(
            [(credentials.key, credentials.leaf)], credentials.issuer, require_client_auth=True
        )

    async def start(self, serve: Serve) -> str:
        async def echo(request: bytes, _: Any) -> bytes:
            return request

        async def bulk(_: AsyncIterator[bytes], context: Any) -> None:
            plan = dict(context.invocation_metadata())["plan"]
            await serve(CallLink(context), msgspec.json.decode(plan, type=Plan))

        methods = {
            "echo": grpc.unary_unary_rpc_method_handler(echo),
            "bulk": grpc.stream_stream_rpc_method_handler(bulk),
        }
        self._server = grpc.aio.server(options=OPTIONS)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        port = self._server.add_secure_port("127.0.0.1:0", self._credentials)
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def close(self) -> None:
        await self._server.stop(None)


class Channel:
    """A separate channel with the echo call; as a dial it counts once the first response is back."""

    def __init__(self, contact: str, credentials: grpc.ChannelCredentials) -> None:
        self._contact = contact
        self._credentials = credentials
        self._message = bytes(ECHO_BYTES)

    async def open(self) -> None:
        self.channel = grpc.aio.secure_channel(self._contact, self._credentials, options=OPTIONS)
        self._echo = self.channel.unary_unary(f"/{SERVICE}/echo")
        await asyncio.wait_for(self.echo(), PATIENCE_S)

    async def echo(self) -> None:
        await self._echo(self._message)

    async def close(self) -> None:
        await self.channel.close()


class Client:
    """Dials."""

    def __init__(self, credentials: Credentials) -> None:
        self.cut = _cut
        self._credentials = grpc.ssl_channel_credentials(credentials.issuer, credentials.key, credentials.leaf)

    async def start(self, contact: str) -> None:
        self._contact = contact
        self._main = self.prepare_dial()
        await self._main.open()
        self.echo = self._main.echo
        self._bulk = self._main.channel.stream_stream(f"/{SERVICE}/bulk")

    async def open_link(self, plan: Plan) -> Link:
        call = self._bulk(metadata=(("plan", msgspec.json.encode(plan).decode()),))
        return CallLink(call, call.done_writing)

    def prepare_dial(self) -> Channel:
        return Channel(self._contact, self._credentials)

    async def close(self) -> None:
        await self._main.close()
