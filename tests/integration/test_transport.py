"""TCP with mutual TLS on loopback: what arrives, who is let in, and why a dial failed."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import random
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, DialFailed, DialReason, PeerLost
from manyhands.base.identity import PeerId
from manyhands.transport import Listener, Stream, TlsTransport, certificate, tcp, tls
from manyhands.transport.admission import ListenLimits
from tests import tls_contexts
from tests.faults.leaks import memory_mb
from tests.network import LOOPBACK, PATIENCE_S, identity_of

SERVER, CLIENT = identity_of(0), identity_of(1)
KINDS = ["control", "bulk"]
ISSUER = certificate.issuer_certificate()
ISSUER_KEY = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"manyhands published issuer, no secret").digest())
"""As published: anybody can sign with it."""
VALIDITY = ISSUER.not_valid_before_utc, ISSUER.not_valid_after_utc


class Accepted:
    """A listener, and the streams that got through to it, in order."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[Any] = asyncio.Queue()
        self.listener: Listener

    async def on_stream(self, stream: Stream) -> None:
        self.streams.put_nowait(stream)
        await stream.wait_closed()

    @property
    def address(self) -> Address:
        return self.listener.addresses[0]


@asynccontextmanager
async def listening(limits: ListenLimits | None = None) -> AsyncIterator[Accepted]:
    accepted, transport = Accepted(), TlsTransport(SERVER, limits)
    accepted.listener = await transport.listen(LOOPBACK, accepted.on_stream)
    try:
        yield accepted
    finally:
        await accepted.listener.close()
        transport.close()


@asynccontextmanager
async def stream_pair(kind: str = "control") -> AsyncIterator[tuple[Any, Any]]:
    async with listening() as accepted:
        transport = TlsTransport(CLIENT)
        dial = transport.dial_bulk if kind == "bulk" else transport.dial
        here: Stream = await dial(accepted.address.with_peer(SERVER.peer_id), 5.0)
        try:
            yield here, await accepted.streams.get()
        finally:
            here.abort()
            await here.wait_closed()
            transport.close()


async def read(stream: Stream, num_bytes: int) -> bytes:
    target = bytearray(num_bytes)
    async with time_limit(PATIENCE_S, f"reading {num_bytes} bytes"):
        await stream.receive_into(memoryview(target))
    return bytes(target)


async def send_for_ever(stream: Stream, data: bytes) -> None:
    while True:
        await stream.send(data)
        await asyncio.sleep(0)


def random_bytes(num_bytes: int) -> bytes:
    return random.Random(num_bytes).randbytes(num_bytes)


# what arrives


@pytest.mark.parametrize("kind", KINDS)
async def test_both_ends_know_each_other(kind: str) -> None:
    async with stream_pair(kind) as (here, there):
        assert (here.remote, there.remote) == (SERVER.peer_id, CLIENT.peer_id)
        assert (here.remote_host, there.remote_host) == ("127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize("kind", KINDS)
async def test_bulk_both_ways_at_once_is_intact(kind: str) -> None:
    data = random_bytes(32 << 20)
    async with stream_pair(kind) as (here, there):
        _, _, from_there, from_here = await asyncio.gather(
            here.send(memoryview(data)), there.send(data[::-1]), read(here, len(data)), read(there, len(data))
        )
    assert hashlib.sha256(from_here).digest() == hashlib.sha256(data).digest()
    assert from_there == data[::-1]
    assert here.bytes_sent == there.bytes_received == len(data)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_slow_reader_bounds_the_memory_of_both_ends(kind: str) -> None:
    data = random_bytes(64 << 20)
    async with stream_pair(kind) as (here, there):
        sending = asyncio.ensure_future(here.send(data))
        first = await read(there, 1000)
        await asyncio.wait([sending], timeout=0.3)  # time enough for all of it, if nothing held it back
        assert not sending.done()
        assert here.bytes_sent < 32 << 20, "most of it is in the buffers of the system"
        assert there.bytes_received < 2 << 20
        rest = await read(there, len(data) - 1000)
        await sending
    assert first + rest == data


@pytest.mark.parametrize("kind", KINDS)
async def test_bytes_sent_before_the_close_arrive_at_a_slow_reader(kind: str) -> None:
    data = random_bytes(3 << 20)
    async with stream_pair(kind) as (here, there):
        await here.send(data)
        closing = asyncio.ensure_future(here.close(10.0))
        received = b"".join([await read(there, len(data) // 8) for _ in range(8)])
        assert received == data
        with pytest.raises(PeerLost):
            await read(there, 1)
        await closing


@pytest.mark.parametrize("kind", KINDS)
async def test_close_is_bounded_when_nobody_reads(kind: str) -> None:
    async with stream_pair(kind) as (here, _):
        sending = asyncio.ensure_future(here.send(bytes(64 << 20)))
        await asyncio.wait([sending], timeout=0.1)
        async with time_limit(10.0, "closing"):
            await here.close(0.1)
        with pytest.raises(PeerLost):
            await sending


async def test_the_first_send_after_a_receive_notices_that_the_other_end_has_closed() -> None:
    async with stream_pair("bulk") as (ours, theirs):
        await theirs.send(b"last")
        assert await read(ours, 4) == b"last"
        theirs.abort()
        with pytest.raises(PeerLost):
            await ours.send(b"the next round")


async def test_sending_succeeds_if_the_other_end_closes_after_it_has_received_all() -> None:
    async with stream_pair("bulk") as (here, there):
        is_closed = threading.Event()

        def pieces() -> Iterator[memoryview]:
            yield memoryview(bytes(1 << 20))
            is_closed.wait(PATIENCE_S)

        sending = asyncio.ensure_future(here.send_each(pieces()))
        await read(there, 1 << 20)
        there.abort()
        await here.wait_closed()
        is_closed.set()
        await sending


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_bytes", [1, 1 << 20])
async def test_sends_to_an_end_that_has_closed_fail_soon(kind: str, num_bytes: int) -> None:
    async with stream_pair(kind) as (here, there):
        there.abort()
        async with time_limit(PATIENCE_S, "for a send to fail"):
            with pytest.raises(PeerLost):
                await send_for_ever(here, bytes(num_bytes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_bytes", [100, 1 << 20])
async def test_a_receive_that_is_cancelled_has_let_go_of_its_memory(kind: str, num_bytes: int) -> None:
    async with stream_pair(kind) as (here, there):
        target = bytearray(num_bytes)
        receiving = asyncio.ensure_future(there.receive_into(memoryview(target)))
        await here.send(b"1" * (num_bytes // 2))
        await asyncio.sleep(0.05)
        receiving.cancel()
        await asyncio.wait([receiving])
        assert receiving.cancelled()
        before = bytes(target)
        with suppress(PeerLost):
            await here.send(b"2" * (num_bytes // 2))
        await asyncio.sleep(0.05)
        assert target == before
        with pytest.raises(PeerLost):
            await read(there, 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_frozen_reader_does_not_keep_an_abort_waiting(kind: str) -> None:
    """Threads that wait for their sockets are woken."""
    process = psutil.Process()
    async with stream_pair(kind) as (here, there):
        num_files = process.num_fds()
        tasks = [
            asyncio.ensure_future(here.send(bytes(64 << 20))),
            asyncio.ensure_future(here.receive_into(memoryview(bytearray(1 << 20)))),
        ]
        await asyncio.sleep(0.1)
        async with time_limit(PATIENCE_S, "for both to end"):
            here.abort()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, PeerLost) for outcome in outcomes)
        there.abort()
        assert process.num_fds() == num_files - 2, "both ends have closed their sockets"


@pytest.mark.parametrize("kind", KINDS)
async def test_large_and_small_messages_take_turns(kind: str) -> None:
    rng = random.Random(5)
    sizes = [rng.choice([1, 1000, 200_000, 3 << 20]) for _ in range(40)]
    async with stream_pair(kind) as (here, there):

        async def send() -> None:
            for number, size in enumerate(sizes):
                await here.send(bytes([number]) * size)

        sending = asyncio.ensure_future(send())
        for number, size in enumerate(sizes):
            assert await read(there, size) == bytes([number]) * size
        await sending


@pytest.mark.parametrize("kind", KINDS)
async def test_pieces_are_made_and_used_one_after_the_other(kind: str) -> None:
    sizes = [1, 300_000, 5, 70_000, 1 << 20]
    buffer, target = bytearray(1 << 20), bytearray(1 << 20)
    used = []

    def pieces() -> Iterator[memoryview]:
        for number, size in enumerate(sizes):
            buffer[:size] = bytes([number]) * size
            yield memoryview(buffer)[:size]

    def views() -> Iterator[memoryview]:
        for size in sizes:
            yield memoryview(target)[:size]
            used.append(bytes(target[:size]))

    async with stream_pair(kind) as (here, there), time_limit(PATIENCE_S, "sending pieces"):
        await asyncio.gather(here.send_each(pieces()), there.receive_each(views()))
        assert here.bytes_sent == there.bytes_received == sum(sizes)
    assert used == [bytes([number]) * size for number, size in enumerate(sizes)]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_exception_of_the_generator_of_pieces_reaches_the_sender(kind: str) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(100_000))
        raise ValueError("no more")

    async with stream_pair(kind) as (here, _), time_limit(PATIENCE_S, "sending pieces"):
        with pytest.raises(ValueError, match="no more"):
            await here.send_each(pieces())


@pytest.mark.skipif(sys.platform != "linux", reason="glibc says how much memory it has given out")
async def test_a_long_message_leaves_no_memory_behind_at_an_idle_stream() -> None:
    data = random_bytes(1 << 20)
    async with stream_pair() as (here, there):
        before_mb = memory_mb()
        for one, other in ((here, there), (there, here)):
            sending = asyncio.create_task(one.send(data))
            assert await read(other, len(data)) == data
            await sending
        assert memory_mb() - before_mb < 0.25


@pytest.mark.parametrize("kind", KINDS)
async def test_abort_wakes_readers_at_both_ends(kind: str) -> None:
    async with stream_pair(kind) as (here, there):
        reading = [asyncio.ensure_future(read(end, 1)) for end in (here, there)]
        await asyncio.sleep(0)
        there.abort()
        async with time_limit(PATIENCE_S, "for both ends to notice"):
            outcomes = await asyncio.gather(*reading, return_exceptions=True)
            await asyncio.gather(here.wait_closed(), there.wait_closed())
        assert all(isinstance(outcome, PeerLost) for outcome in outcomes)
        with pytest.raises(PeerLost):
            await there.send(b"too late")


async def test_a_message_that_is_cancelled_is_not_torn() -> None:
    """It arrives whole or not at all, and the stream goes on."""
    rng = random.Random(7)
    num_bytes = 1 << 20
    async with stream_pair() as (here, there):
        for number in range(40):
            message = bytes([number]) * num_bytes
            sending = asyncio.ensure_future(here.send_message(message))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        sending = asyncio.ensure_future(here.send_message(bytes([255]) * num_bytes))
        numbers: list[int] = []
        while 255 not in numbers:
            message = await read(there, num_bytes)
            assert message == message[:1] * num_bytes, "torn"
            numbers.append(message[0])
        await sending
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_long_send_that_is_cancelled_half_way_ends_the_stream(kind: str) -> None:
    """Nobody could tell where the next message begins."""
    async with stream_pair(kind) as (here, there):
        sending = asyncio.ensure_future(here.send(bytes(64 << 20)))
        await read(there, 1 << 20)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        with pytest.raises(PeerLost):
            await here.send(b"next message")
        with pytest.raises(PeerLost):
            await read(there, 64 << 20)


# why a dial failed


async def failure_of(address: Address | str, timeout_s: float = 2.0) -> DialFailed:
    address = Address.parse(address) if isinstance(address, str) else address
    with pytest.raises(DialFailed) as caught:
        await TlsTransport(CLIENT).dial(address, timeout_s)
    assert caught.value.address == str(address)
    return caught.value


@contextmanager
def silent_port(*, listens: bool) -> Iterator[Address]:
    """A port that is taken and refuses, or takes connections and says nothing."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        if listens:
            sock.listen(16)
        yield Address.of("127.0.0.1", sock.getsockname()[1])


@asynccontextmanager
async def server_of(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any], context: ssl.SSLContext | None = None
) -> AsyncIterator[Address]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield Address.of("127.0.0.1", server.sockets[0].getsockname()[1])
    server.close()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    writer.close()


def context_of_another_issuer(folder: Path, protocol: int = ssl.PROTOCOL_TLS_SERVER) -> ssl.SSLContext:
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "example.org")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, *VALIDITY)
    return with_leaf(ssl.SSLContext(protocol), folder, key, builder.sign(key, None))


def context_with_a_key_that_is_not_ed25519(folder: Path, protocol: int = ssl.PROTOCOL_TLS_SERVER) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")])
    builder = x509.CertificateBuilder(ISSUER.subject, name, key.public_key(), 2, *VALIDITY)
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(ISSUER_KEY.public_key())
    leaf = builder.add_extension(issuer_id, False).sign(ISSUER_KEY, None)
    return with_leaf(tls_contexts.plain_context(protocol), folder, key, leaf)


def with_leaf(context: ssl.SSLContext, folder: Path, key: Any, leaf: x509.Certificate) -> ssl.SSLContext:
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + leaf.public_bytes(serialization.Encoding.PEM)
    (folder / "leaf.pem").write_bytes(pem)
    context.load_cert_chain(folder / "leaf.pem")
    return context


async def test_dialling_a_port_where_nothing_listens_fails_as_refused() -> None:
    with silent_port(listens=False) as address:
        failure = await failure_of(address)
    assert failure.reason is DialReason.REFUSED


async def test_dialling_a_silent_port_times_out() -> None:
    with silent_port(listens=True) as address:
        async with time_limit(PATIENCE_S, "for the dial to give up"):
            failure = await failure_of(address, timeout_s=0.2)
    assert failure.reason is DialReason.TIMED_OUT
    assert "TCP connects, but no TLS handshake follows" in str(failure)


async def test_dialling_fails_if_another_identity_answers() -> None:
    async with listening() as accepted:
        failure = await failure_of(accepted.address.with_peer(identity_of(5).peer_id))
    assert failure.reason is DialReason.WRONG_IDENTITY
    assert f"found {SERVER.peer_id}" in str(failure)


async def test_dialling_the_peer_itself_fails() -> None:
    async with listening() as accepted:
        with pytest.raises(DialFailed) as caught:
            await TlsTransport(SERVER).dial(accepted.address, 10.0)
    assert caught.value.reason is DialReason.ITSELF


@pytest.mark.parametrize("alpn", [["manyhands/2"], []])
async def test_dialling_a_peer_of_another_protocol_version_fails(alpn: list[str]) -> None:
    context = tls_contexts.server_context(SERVER)
    context.set_alpn_protocols(alpn)
    async with server_of(hang_up, context) as address:
        failure = await failure_of(address)
    assert failure.reason is DialReason.PROTOCOL_VERSION
    assert "it does not speak manyhands/1, as this peer does" in str(failure)


@pytest.mark.parametrize(
    ("serve", "said"), [(answer_http, "does not answer in TLS 1.3"), (hang_up, "closes them in the TLS handshake")]
)
async def test_dialling_a_server_without_tls_fails_as_not_manyhands(serve: Callable[..., Any], said: str) -> None:
    async with server_of(serve) as address:
        failure = await failure_of(address)
    assert failure.reason is DialReason.NOT_MANYHANDS
    assert said in str(failure)


async def test_dialling_a_tls_server_of_another_issuer_fails_as_not_manyhands(tmp_path: Path) -> None:
    async with server_of(hang_up, context_of_another_issuer(tmp_path)) as address:
        failure = await failure_of(address)
    assert failure.reason is DialReason.NOT_MANYHANDS
    assert "the TLS server of another program" in str(failure)


async def test_dialling_a_server_with_an_older_tls_fails_as_not_manyhands() -> None:
    context = tls_contexts.server_context(SERVER)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with server_of(hang_up, context) as address:
        failure = await failure_of(address)
    assert failure.reason is DialReason.NOT_MANYHANDS


async def test_dialling_a_server_whose_key_is_not_ed25519_fails_as_not_manyhands(tmp_path: Path) -> None:
    async with server_of(hang_up, context_with_a_key_that_is_not_ed25519(tmp_path)) as address:
        failure = await failure_of(address)
    assert failure.reason is DialReason.NOT_MANYHANDS


async def test_dialling_a_name_that_does_not_resolve_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_name(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    failure = await failure_of("/dns4/nowhere.example/tcp/31337")
    assert failure.reason is DialReason.NAME_NOT_FOUND
    assert "Name or service not known" in str(failure)


async def test_name_servers_that_do_not_answer_delay_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other peers announce names too: a lookup can hang for longer than any dial waits."""
    over, lookups, real = threading.Event(), [], socket.getaddrinfo

    def hang(host: str, *args: Any, **kwargs: Any) -> Any:
        if not host.endswith(".example"):
            return real(host, *args, **kwargs)
        lookups.append(threading.current_thread())
        over.wait(60.0)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        hanging = [asyncio.ensure_future(failure_of(f"/dns4/{i}.example/tcp/1", 0.5)) for i in range(40)]
        async with listening() as accepted, time_limit(PATIENCE_S, "for a dial beside hanging lookups"):
            stream = await TlsTransport(CLIENT).dial(accepted.address, 10.0)
            stream.abort()
        async with time_limit(PATIENCE_S, "for the dials to give up"):
            failures = await asyncio.gather(*hanging)
        assert all(failure.reason is DialReason.NAME_NOT_FOUND for failure in failures)
        assert "no answer within 0.5 s" in str(failures[0])
        assert all(thread.daemon for thread in lookups), "or the end of the process would wait for them"
    finally:
        over.set()
        for thread in lookups:
            thread.join(5.0)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ECONNREFUSED, DialReason.REFUSED),
        (errno.ETIMEDOUT, DialReason.TIMED_OUT),
        (errno.ENETUNREACH, DialReason.UNREACHABLE),
        (errno.EHOSTUNREACH, DialReason.UNREACHABLE),
        (errno.EAFNOSUPPORT, DialReason.UNREACHABLE),
        (errno.EMFILE, DialReason.UNREACHABLE),
    ],
)
async def test_errors_of_connect_become_dial_reasons(
    number: int, reason: DialReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(sock: socket.socket, address: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", refuse)
    failure = await failure_of("/ip4/127.0.0.1/tcp/1")
    assert failure.reason is reason


async def test_names_that_hang_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def hang(*args: Any, **kwargs: Any) -> Any:
        go_on.wait(10.0)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    before = threading.active_count()
    failures = await asyncio.gather(
        *(failure_of(f"/dns4/host{number}.example/tcp/1", timeout_s=0.3) for number in range(tcp.MAX_LOOKUPS + 3))
    )
    assert threading.active_count() <= before + tcp.MAX_LOOKUPS
    assert all(failure.reason is DialReason.NAME_NOT_FOUND for failure in failures)
    go_on.set()
    while threading.active_count() > before:
        await asyncio.sleep(0.001)


async def test_every_dial_reason_has_its_own_text() -> None:
    assert len({reason.value for reason in DialReason}) == len(DialReason)


async def test_a_cancelled_dial_leaves_nothing() -> None:
    with silent_port(listens=True) as address:
        before = num_sockets()
        dial = asyncio.ensure_future(TlsTransport(CLIENT).dial(address, 30.0))
        await until_more_sockets(before)
        dial.cancel()
        await asyncio.wait([dial])
        await asyncio.sleep(0)
        assert num_sockets() == before


def num_sockets() -> int:
    return len(psutil.Process().net_connections("tcp"))


async def until_more_sockets(before: int) -> None:
    async with time_limit(PATIENCE_S, "for a connection"):
        while num_sockets() <= before:
            await asyncio.sleep(0.001)


# where one can listen


async def test_a_taken_port_is_named() -> None:
    with silent_port(listens=True) as address, pytest.raises(ConfigError) as caught:
        await TlsTransport(SERVER).listen(address, Accepted().on_stream)
    assert f"port {address.port} is taken; choose another, or 0 for a free one" in str(caught.value)


async def test_listening_on_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="this machine has no such address"):
        await TlsTransport(SERVER).listen(Address.parse("/ip4/192.0.2.1/tcp/0"), Accepted().on_stream)
    with pytest.raises(ConfigError, match="cannot listen on /ip6/2001:db8::7/tcp/0"):  # also without IPv6
        await TlsTransport(SERVER).listen(Address.parse("/ip6/2001:db8::7/tcp/0"), Accepted().on_stream)


async def test_a_transport_listens_on_a_name_that_resolves_to_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = Accepted()
    accepted.listener = await TlsTransport(SERVER).listen(Address.parse("/dns4/localhost/tcp/0"), accepted.on_stream)
    assert accepted.address.host == "127.0.0.1"
    stream = await TlsTransport(CLIENT).dial(Address.parse(f"localhost:{accepted.address.port}"), 5.0)
    stream.abort()
    await accepted.listener.close()

    def no_such_name(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    with pytest.raises(ConfigError, match=r"/dns4/nowhere\.example/tcp/0.*does not resolve"):
        await TlsTransport(SERVER).listen(Address.parse("/dns4/nowhere.example/tcp/0"), accepted.on_stream)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
async def test_all_interfaces_with_both_families_are_one_port() -> None:
    accepted = Accepted()
    accepted.listener = await TlsTransport(SERVER).listen(Address.parse("[::]:0"), accepted.on_stream)
    with_ip4, with_ip6 = accepted.listener.addresses
    assert str(with_ip4) == f"/ip4/0.0.0.0/tcp/{with_ip6.port}"
    assert str(with_ip6) == f"/ip6/::/tcp/{with_ip6.port}"
    for host in ("127.0.0.1", "::1"):
        stream = await TlsTransport(CLIENT).dial(Address.of(host, with_ip6.port), 5.0)
        assert (await accepted.streams.get()).remote_host == host, "as others can dial it, not ::ffff:127.0.0.1"
        stream.abort()
    await accepted.listener.close()


async def test_a_machine_without_ipv6_listens_on_ipv4_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    caplog.set_level(logging.INFO, "manyhands")
    accepted = Accepted()
    accepted.listener = await TlsTransport(SERVER).listen(Address.parse("[::]:0"), accepted.on_stream)
    assert [address.host for address in accepted.listener.addresses] == ["0.0.0.0"]
    assert caplog.text == ""
    await accepted.listener.close()


@pytest.mark.parametrize("side", ["dialled", "accepted"])
async def test_sockets_reset_before_they_are_set_up_use_up_no_limit(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS shows it; nothing of it counts for ever."""
    prepare, num_calls = tcp.prepare, 0

    def fail_at_first(sock: socket.socket) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 4:
            raise OSError(errno.EINVAL, "Invalid argument")
        prepare(sock)

    async with listening(ListenLimits(max_handshakes=2)) as accepted:
        if side == "dialled":
            monkeypatch.setattr(tcp, "prepare", fail_at_first)
            assert (await failure_of(accepted.address)).reason is DialReason.UNREACHABLE
            num_calls = 3
        else:
            with monkeypatch.context() as patch:
                patch.setattr(tls.tcp, "prepare", fail_at_first)
                for _ in range(3):
                    reader, writer = await asyncio.open_connection(accepted.address.host, accepted.address.port)
                    await assert_dropped(reader, writer)
        await assert_serves(accepted)


# who is let in


CLIENT_HELLO_BEGINS = bytes.fromhex("1603010200010001fc0303")


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
        random_bytes(10_000),
        b"\x16\x03\x01\xff\xff" + bytes(70_000),
        b"\x00" * 100_000,
        b"\x13BitTorrent protocol" + bytes(48),
    ],
    ids=["http", "random", "huge record", "zeros", "bittorrent"],
)
async def test_garbage_is_dropped_and_others_are_served(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as accepted:
        reader, writer = await asyncio.open_connection(accepted.address.host, accepted.address.port)
        writer.write(garbage)
        await assert_dropped(reader, writer)
        await assert_serves(accepted)
    assert_quiet(caplog)


async def test_a_client_that_says_nothing_or_too_little_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """Or a byte now and then: the handshake as a whole has its time."""
    async with listening(ListenLimits(handshake_timeout_s=0.3)) as accepted:
        for words in (b"", CLIENT_HELLO_BEGINS):
            reader, writer = await asyncio.open_connection(accepted.address.host, accepted.address.port)
            writer.write(words)
            await assert_serves(accepted)
            await assert_dropped(reader, writer)
    assert_quiet(caplog)


@pytest.mark.parametrize("kind", ["no certificate", "another issuer", "not ed25519", "another alpn", "no alpn"])
async def test_tls_clients_that_are_no_peers_are_dropped(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    alpn = [certificate.ALPN]
    if kind == "another issuer":
        context = context_of_another_issuer(tmp_path, ssl.PROTOCOL_TLS_CLIENT)
    elif kind == "not ed25519":
        context = context_with_a_key_that_is_not_ed25519(tmp_path, ssl.PROTOCOL_TLS_CLIENT)
    elif kind.endswith("alpn"):
        context = tls_contexts.client_context(CLIENT)
        alpn = ["manyhands/2"] if kind == "another alpn" else []
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(alpn)
    async with listening() as accepted:
        reader, writer = await asyncio.open_connection(accepted.address.host, accepted.address.port, ssl=context)
        writer.write(b"hello")
        await assert_dropped(reader, writer)
        assert accepted.streams.empty()
        await assert_serves(accepted)
    assert_quiet(caplog)


async def test_a_flood_of_garbage_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as accepted:
        writers = []
        for number in range(100):
            _, writer = await asyncio.open_connection(accepted.address.host, accepted.address.port)
            writer.write(CLIENT_HELLO_BEGINS if number % 2 else random_bytes(100))
            writers.append(writer)
        await assert_serves(accepted)
        for writer in writers:
            writer.transport.abort()
    assert_quiet(caplog)


async def test_close_ends_handshakes_that_are_under_way(caplog: pytest.LogCaptureFixture) -> None:
    before = num_sockets()
    async with listening() as accepted:
        connections = []
        for words in (b"", CLIENT_HELLO_BEGINS):
            connections.append(await asyncio.open_connection(accepted.address.host, accepted.address.port))
            connections[-1][1].write(words)
        await assert_serves(accepted)
        async with time_limit(5.0, "for the listener to close"):
            await accepted.listener.close()
    for reader, writer in connections:
        await assert_dropped(reader, writer)
    await asyncio.sleep(0)
    assert num_sockets() == before
    assert_quiet(caplog)


async def test_accepting_goes_on_after_the_system_ran_out_of_sockets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, num_failures = socket.socket.accept, 0

    def fail_at_first(sock: socket.socket) -> Any:
        nonlocal num_failures
        num_failures += 1
        if num_failures < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(sock)

    monkeypatch.setattr(tls, "ACCEPT_PAUSE_S", 0.01)
    monkeypatch.setattr(socket.socket, "accept", fail_at_first)
    async with listening() as accepted:
        await assert_serves(accepted)
    assert caplog.text.count("Cannot accept connections: Too many open files; trying again each 0.01 s") == 1


async def test_a_failing_handler_ends_its_stream_only(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(stream: Stream) -> None:
        raise ValueError("broken")

    listener = await TlsTransport(SERVER).listen(LOOPBACK, fail)
    try:
        for _ in range(2):
            stream = await TlsTransport(CLIENT).dial(listener.addresses[0], 5.0)
            async with time_limit(PATIENCE_S, "for the stream to end"):
                await stream.wait_closed()
    finally:
        await listener.close()
    assert "ValueError: broken" in caplog.text


async def assert_dropped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        async with time_limit(PATIENCE_S, "to be dropped"):
            await reader.read()  # perhaps an alert, then the end
    except (OSError, ssl.SSLError):
        pass
    finally:
        writer.transport.abort()


async def assert_serves(accepted: Accepted) -> None:
    stream = await TlsTransport(identity_of(7)).dial(accepted.address, 5.0)
    async with time_limit(PATIENCE_S, "for the stream to be served"):
        while (served := await accepted.streams.get()).remote != PeerId(identity_of(7).peer_id):
            pass
    await stream.send(b"ok")
    assert await read(served, 2) == b"ok"
    stream.abort()
    await stream.wait_closed()


def assert_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What anybody can cause from outside must not fill the log."""
    loud = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not loud
