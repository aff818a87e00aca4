"""A peer as a user makes it: what it listens on, whom it joins, and what is left of it when it is closed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

import manyhands
from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, DialReason, JoinFailed, ManyhandsError, PeerLost
from manyhands.dht import DhtConfig
from manyhands.runtime import LoopThread
from manyhands.transport import TlsTransport
from tests import tls_contexts
from tests.network import ECHO, Text, identity_of, serve_echo

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
T = TypeVar("T")


@pytest.fixture
def servers() -> Iterator[LoopThread]:
    """A loop for servers that are no peers."""
    runtime = LoopThread("manyhands test servers")
    yield runtime
    runtime.close()


def on(peer: manyhands.Peer, coro: Coroutine[Any, Any, T]) -> T:
    return peer.run(coro, 10.0, "in a test")


async def dial(address: Address) -> None:
    (await TlsTransport(identity_of(9)).dial(address, 5.0)).abort()


def test_a_peer_listens_on_all_interfaces_by_default_and_gives_addresses_that_work() -> None:
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # the first one is with both families
    with manyhands.Peer() as peer, manyhands.Peer(peer.addresses, client_mode=True) as other:
        listening = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        ports = {Address.parse(text).port for text in peer.addresses}
        assert {(everywhere, port) for port in ports} <= listening
        assert any(address.is_loopback for address in peer.endpoint.addresses), "for peers on the same machine"
        for text in peer.addresses:
            address = Address.parse(text)
            assert address.peer_id == peer.peer_id
            assert not address.is_unspecified
            on(other, dial(address))
        assert other.addresses == []


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_peer_given_a_port_alone_listens_on_ipv4_and_ipv6() -> None:
    with manyhands.Peer(listen=["/ip4/0.0.0.0/tcp/0", "*:*"]) as peer:
        [port] = {address.port for address in peer.endpoint.addresses}
        for host in ("127.0.0.1", "::1"):
            with manyhands.Peer([Address.of(host, port)], client_mode=True) as other:
                assert other.dht.num_known_peers == 1
                assert other.addresses == []


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_peers_with_one_family_each_dial_a_peer_with_both_and_are_dialled_by_it() -> None:
    with manyhands.Peer() as peer:
        [port] = {address.port for address in peer.endpoint.addresses}
        for host in ("127.0.0.1", "::1"):
            with manyhands.Peer([Address.of(host, port)], listen=[f"/ip{6 if ':' in host else 4}/{host}/tcp/0"]) as one:
                assert peer.endpoint.host_of(one.peer_id) == host
                on(peer, peer.endpoint.reach(one.peer_id, 5.0))
                assert [address.host for address in peer.endpoint.reached_at(one.peer_id)] == [host]


def test_a_peer_without_ipv6_has_ipv4_by_default_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Ip4Socket(socket.socket):
        def __init__(self, family: int = -1, *args: Any, **kwargs: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *args, **kwargs)

    monkeypatch.setattr(socket, "socket", Ip4Socket)
    caplog.set_level(logging.INFO, "manyhands")
    with manyhands.Peer() as peer:
        assert {address.protocol for address in peer.endpoint.bound_addresses} == {"ip4"}
        assert peer.addresses
        assert all(text.startswith("/ip4/") for text in peer.addresses)
        with manyhands.Peer(peer.addresses, client_mode=True) as other:
            assert other.dht.num_known_peers == 1
        with pytest.raises(ConfigError, match=r"cannot listen on /ip6/::1/tcp/0: Address family not supported"):
            manyhands.Peer(listen=["/ip6/::1/tcp/0"])
    assert "IPv6" not in caplog.text


def test_an_empty_address_is_refused_and_does_not_begin_a_swarm() -> None:
    with pytest.raises(ConfigError, match="a variable of the shell is probably unset"):
        manyhands.Peer(initial_peers=[""])


def test_the_first_peer_cannot_be_in_client_mode() -> None:
    with pytest.raises(ConfigError, match=r"initial_peers=\), or leave client mode out"):
        manyhands.Peer(client_mode=True)


def test_a_client_may_come_back_by_the_peers_that_it_knows(tmp_path: Path) -> None:
    with manyhands.Peer(listen=LOOPBACK) as first:
        with pytest.raises(ConfigError, match="client mode"):
            manyhands.Peer(client_mode=True, state_dir=tmp_path)
        with manyhands.Peer(first.addresses, client_mode=True, state_dir=tmp_path):
            pass
        with manyhands.Peer(client_mode=True, state_dir=tmp_path) as client:
            assert client.dht.num_known_peers == 1


def test_a_peer_gives_the_announced_addresses_as_its_own() -> None:
    with manyhands.Peer(announce=["/dns4/localhost/tcp/12345"]) as peer:
        assert peer.addresses == [f"/dns4/localhost/tcp/12345/p2p/{peer.peer_id}"]


def test_other_peers_are_told_the_announced_address_and_not_where_the_peer_was_reached() -> None:
    tunnel = "/dns4/x.tcp.ngrok.io/tcp/12345"
    with manyhands.Peer(listen=LOOPBACK) as hidden:
        hidden.announce([tunnel])
        (address,) = hidden.endpoint.bound_addresses
        with manyhands.Peer([str(address)], listen=LOOPBACK) as neighbour:
            assert [contact.addresses for contact in neighbour.dht.contacts()] == [[tunnel]]
            assert str(address.port) in str(neighbour.endpoint.addresses_of(hidden.peer_id)[0])


def test_addresses_that_change_are_told_to_connected_peers_at_once() -> None:
    tunnel = "/dns4/x.tcp.ngrok.io/tcp/12345"
    with manyhands.Peer(listen=LOOPBACK) as moving, manyhands.Peer(moving.addresses, listen=LOOPBACK) as neighbour:
        own = moving.addresses
        told: concurrent.futures.Future[str] = concurrent.futures.Future()
        neighbour.endpoint.on_moved.append(told.set_result)
        moving.announce([tunnel])
        assert told.result(5.0) == moving.peer_id
        assert moving.addresses == [f"{tunnel}/p2p/{moving.peer_id}"]
        assert [str(a) for a in neighbour.endpoint.addresses_to_tell(moving.peer_id)] == moving.addresses
        with pytest.raises(ConfigError, match="other peers cannot dial"):
            moving.announce(["127.0.0.1:0"])
        moving.announce()
        assert moving.addresses == own


@pytest.mark.parametrize("bad", ["/ip4/0.0.0.0/tcp/31337", "127.0.0.1:0"])
def test_a_peer_refuses_to_announce_an_address_that_nobody_could_dial(bad: str) -> None:
    with pytest.raises(ConfigError, match="other peers cannot dial"):
        manyhands.Peer(listen=LOOPBACK, announce=[bad])


def test_two_peers_call_each_other() -> None:
    with manyhands.Peer(listen=LOOPBACK) as first:
        with manyhands.Peer(first.addresses, client_mode=True) as second:
            serve_echo(first.endpoint)
            serve_echo(second.endpoint)
            assert on(first, first.endpoint.call(second.peer_id, ECHO, Text("hi"))).text.startswith("hi")
            assert on(second, second.endpoint.call(first.peer_id, ECHO, Text("hi"))).text.startswith("hi")
            lost: concurrent.futures.Future[str] = concurrent.futures.Future()
            first.endpoint.on_lost.append(lost.set_result)
        assert lost.result(5.0) == second.peer_id, "its goodbye came"


def test_a_taken_port_is_named_and_nothing_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        before = num_sockets()
        with pytest.raises(ConfigError, match=f"port {port} is taken; choose another, or 0 for a free one"):
            manyhands.Peer(listen=[*LOOPBACK, f"/ip4/127.0.0.1/tcp/{port}"])
        assert num_sockets() == before


def test_a_peer_stores_and_reads_without_a_coroutine() -> None:
    with manyhands.Peer(listen=LOOPBACK) as first, manyhands.Peer(first.addresses, listen=LOOPBACK) as second:
        assert first.store("notes", {"loss": 3.5, "shape": (2, 3)}, ttl_s=60, subkey=first.peer_id) == 2
        second.store("notes", b"for everybody", ttl_s=60)
        notes = {first.peer_id: {"loss": 3.5, "shape": [2, 3]}, "": b"for everybody"}
        assert first.get("notes") == second.get("notes") == notes
        first.store("notes", None, ttl_s=60)
        assert second.get("notes") == {first.peer_id: notes[first.peer_id]}
        assert second.get("nothing") == {}
        for key in (5, b"x", ("a",), ["a"]):
            with pytest.raises(ConfigError, match="it must be a str"):
                first.store(key, 1, ttl_s=60)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="it must be a str"):
                first.get(key)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="it must be a str"):
                on(first, first.dht.get_many([key]))  # type: ignore[list-item]


# joining


@contextmanager
def bad_addresses(servers: LoopThread) -> Iterator[dict[DialReason, str]]:
    """One address for each reason why a dial can fail."""

    async def answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def serve() -> tuple[int, int]:
        context = tls_contexts.server_context(identity_of(3))
        context.set_alpn_protocols(["manyhands/2"])
        newer = await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=context)
        web = await asyncio.start_server(answer_http, "127.0.0.1", 0)
        running.extend([newer, web])
        return newer.sockets[0].getsockname()[1], web.sockets[0].getsockname()[1]

    async def stop() -> None:
        for server in running:
            server.close()

    running: list[asyncio.Server] = []
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unused = stack.enter_context(socket.socket())
        unused.bind(("127.0.0.1", 0))
        other = stack.enter_context(manyhands.Peer(listen=LOOPBACK))
        newer_port, web_port = servers.run(serve(), 5.0, "starting servers")
        place = other.addresses[0].rpartition("/")[0]
        yield {
            DialReason.REFUSED: f"/ip4/127.0.0.1/tcp/{unused.getsockname()[1]}",
            DialReason.TIMED_OUT: f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}",
            DialReason.NAME_NOT_FOUND: "/dns4/nowhere.example/tcp/31337",
            DialReason.WRONG_IDENTITY: f"{place}/{identity_of(4).peer_id}",
            DialReason.PROTOCOL_VERSION: f"/ip4/127.0.0.1/tcp/{newer_port}",
            DialReason.NOT_MANYHANDS: f"/ip4/127.0.0.1/tcp/{web_port}",
        }
        servers.run(stop(), 5.0, "stopping servers")


@pytest.fixture
def no_such_name(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        if str(host).endswith(".example"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.usefixtures("no_such_name")
def test_each_initial_peer_that_fails_is_named_with_its_own_reason(servers: LoopThread) -> None:
    with bad_addresses(servers) as bad:
        began = time.monotonic()
        with pytest.raises(JoinFailed) as caught:
            manyhands.Peer(list(bad.values()), listen=LOOPBACK, dht_config=DhtConfig(join_timeout_s=1.0))
        assert time.monotonic() - began < DhtConfig().join_timeout_s
    assert {failure.reason: failure.address for failure in caught.value.failures} == bad
    for reason, address in bad.items():
        assert f"\n  {address}: {reason.value}" in str(caught.value)


@pytest.mark.usefixtures("no_such_name")
def test_one_initial_peer_that_answers_is_enough(servers: LoopThread) -> None:
    with bad_addresses(servers) as bad, manyhands.Peer(listen=LOOPBACK) as good:
        began = time.monotonic()
        with manyhands.Peer([*bad.values(), *good.addresses], listen=LOOPBACK) as peer:
            assert time.monotonic() - began < DhtConfig().join_timeout_s
            assert on(peer, peer.endpoint.connect(Address.parse(good.addresses[0]))) == good.peer_id


def test_joining_takes_no_longer_than_its_time() -> None:
    """A port that takes connections and says nothing is the slowest to fail."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(JoinFailed, match="timed out: no answer"):
            manyhands.Peer(
                [f"127.0.0.1:{silent.getsockname()[1]}"], listen=LOOPBACK, dht_config=DhtConfig(join_timeout_s=0.5)
            )
        assert time.monotonic() - began < DhtConfig().join_timeout_s


def test_addresses_that_cannot_be_read_start_nothing() -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="cannot read address 'nonsense'"):
        manyhands.Peer(["nonsense"])
    assert threading.active_count() == threads


# closing


def num_sockets() -> int:
    return len(psutil.Process().net_connections("all"))


def test_close_is_quick_and_leaves_no_thread_and_no_socket() -> None:
    gc.collect()
    threads, sockets, files = threading.active_count(), num_sockets(), psutil.Process().num_fds()
    peers = [manyhands.Peer(listen=LOOPBACK)]
    peers += [manyhands.Peer(peers[0].addresses, listen=LOOPBACK) for _ in range(3)]
    peers.append(manyhands.Peer(peers[0].addresses, client_mode=True))
    visitors = [socket.create_connection(("127.0.0.1", Address.parse(peers[0].addresses[0]).port)) for _ in range(3)]
    for peer in peers:
        began = time.monotonic()
        peer.close()
        peer.close()
        assert time.monotonic() - began < 2.0
    for visitor in visitors:
        visitor.settimeout(2.0)
        assert visitor.recv(1) == b"", "a connection that said nothing is closed too"
        visitor.close()
    assert (threading.active_count(), num_sockets(), psutil.Process().num_fds()) == (threads, sockets, files)


def test_closing_a_peer_ends_calls_that_wait_on_other_threads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, concurrent.futures.ThreadPoolExecutor(1) as pool:
        peer = manyhands.Peer(listen=LOOPBACK)
        where = Address.of("127.0.0.1", silent.getsockname()[1])
        connecting = pool.submit(peer.run, peer.endpoint.connect(where, 30.0), 30.0, "connecting")
        silent.settimeout(20.0)
        visitor, _ = silent.accept()
        peer.close()
        with pytest.raises(ManyhandsError, match=r"this peer is closed|the peer is closed"):
            connecting.result(20.0)
        visitor.close()
        with pytest.raises(ManyhandsError, match="the peer is closed"):
            on(peer, asyncio.sleep(0))


def test_a_part_that_cannot_be_closed_does_not_keep_the_others_open(caplog: pytest.LogCaptureFixture) -> None:
    with manyhands.Peer(listen=LOOPBACK) as other:
        peer = manyhands.Peer(other.addresses, listen=LOOPBACK)
        reason: concurrent.futures.Future[str] = concurrent.futures.Future()
        other.endpoint.on_lost.append(reason.set_result)

        async def fail() -> None:
            raise ValueError("broken")

        async def hang() -> None:
            await asyncio.Event().wait()

        peer.presence.on_close += [fail, hang]
        began = time.monotonic()
        with caplog.at_level(logging.DEBUG):
            peer.close()
            assert time.monotonic() - began < 4.0
            assert reason.result(2.0) == peer.peer_id
    assert "ValueError: broken" in caplog.text
    assert "it closed the connection: shutting down" in caplog.text, "the others were told"


UNCLOSED = """
import asyncio, sys
import manyhands
peer = manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"])
other = manyhands.Peer(peer.addresses + ["/dns4/localhost/tcp/1"], listen=["/ip4/127.0.0.1/tcp/0"])

async def use_the_executor():
    await asyncio.get_running_loop().run_in_executor(None, int)

other.run(use_the_executor(), 5.0, "testing")
print("the end")
"""

FORKED = """
import os, sys
import manyhands
with manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"]) as peer:
    child = os.fork()
    if child == 0:
        try:
            peer.run(peer.endpoint.close(), 1.0, "in the child")
        except manyhands.ManyhandsError as error:
            print(error, flush=True)
        sys.exit()  # as a user's child would, through all handlers
    assert os.waitpid(child, 0)[1] == 0
print("the end")
"""

JOINING = """
import sys
import manyhands
print("joining", flush=True)
try:
    manyhands.Peer(["127.0.0.1:" + sys.argv[1]])
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def run_script(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "default", "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.process
def test_a_script_that_never_closes_its_peers_ends_quietly() -> None:
    process = run_script(UNCLOSED)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "the end\n", "")


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork there")
def test_a_forked_child_says_that_the_peer_is_not_its_own_and_ends_quietly() -> None:
    process = run_script(FORKED)
    out, err = process.communicate(timeout=120)
    err = "\n".join(line for line in err.splitlines() if "multi-threaded" not in line and "os.fork()" not in line)
    said = "the peer is closed; make another one. A forked process has to make one of its own"
    assert (process.returncode, out, err) == (0, f"{said}\nthe end\n", "")


@pytest.mark.process
def test_ctrl_c_interrupts_joining() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = run_script(JOINING, str(silent.getsockname()[1]))
        silent.settimeout(120.0)
        connection, _ = silent.accept()  # it has begun
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        connection.close()
    assert (process.returncode, out, err) == (0, "joining\ninterrupted\n", "")
    assert time.monotonic() - began < DhtConfig().join_timeout_s


def test_a_peer_that_is_closed_is_lost_to_the_others_at_once() -> None:
    with manyhands.Peer(listen=LOOPBACK) as first:
        second = manyhands.Peer(first.addresses, listen=LOOPBACK)
        asked = threading.Event()

        async def never(remote: str, request: Text) -> Text:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        second.endpoint.handle(ECHO, never)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            calling = pool.submit(on, first, first.endpoint.call(second.peer_id, ECHO, Text("hi"), 60.0))
            assert asked.wait(120)
            second.close()
            with pytest.raises(PeerLost, match="it closed the connection: shutting down"):
                calling.result(20.0)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"initial_peers": None}, "None is not a list of addresses; give a list, or leave the argument out"),
        ({"initial_peers": [None]}, "address None is of type NoneType; it must be a text, like"),
        ({"initial_peers": [b"127.0.0.1:1"]}, "of type bytes; it must be a text, like"),
        ({"listen": 31337}, r"'31337' is one address where a list of them is needed; write \['31337'\]"),
        ({"listen": [31337]}, "address 31337 is of type int; it must be a text"),
        ({"listen": []}, "listen is empty; leave it out"),
        ({"announce": None}, "None is not a list of addresses"),
        ({"client_mode": "no"}, "client_mode='no' must be True, False or None"),
        ({"client_mode": True, "announce": ["127.0.0.1:2"]}, "announce=.* and client_mode=True that they cannot"),
        ({"client_mode": True, "listen": ["31337"]}, "port 31337 is given to listen on, .* only dials out; leave one"),
        ({"must_join": 1}, "must_join=1 must be True or False"),
        ({"identity": 3}, "identity is of type int"),
        ({"state_dir": 3}, "state_dir is of type int"),
        ({"state_dir": ""}, "state_dir is empty; name a folder, such as my-peer, or leave it out"),
        ({"credential": None}, "credential is of type NoneType"),
    ],
)
def test_a_wrong_argument_is_named(
    named: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        manyhands.Peer(**{"initial_peers": ["127.0.0.1:1"]} | named)
    assert not list(tmp_path.iterdir())
