"""Sources of a first peer's public address, faked at their sockets."""

from __future__ import annotations

import contextlib
import http.server
import logging
import queue
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import pytest

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError
from manyhands.cli.options import PeerOptions
from manyhands.cli.public_address import announce_public, map_port
from manyhands.peer import Peer
from manyhands.reach import Reach, port_mapping, public_address
from manyhands.reach.messages import ExamineResponse
from manyhands.reach.public_address import SOURCE_TIMEOUT_S, PublicAddress, begun, infer, mapped_by_router
from tests.integration.test_interfaces import UNSHARE, has_namespaces
from tests.network import free_port
from tests.waiting import PATIENCE_S

PUBLIC, ROUTER, PRIVATE = "93.184.216.34", "198.51.45.7", "10.0.0.5"
PORT = 31337
NOBODY = "http://127.0.0.1:9"
SSDP = ("239.255.255.250", 1900)

Answer = Callable[[http.server.BaseHTTPRequestHandler], str | None]


@contextmanager
def http_server(answer: Answer) -> Iterator[str]:
    """Serves what ``answer`` returns; 404 if that is None."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answer(self)
            self.send_response(404 if text is None else 200)
            body = (text or "").encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_POST = do_GET  # noqa: N815 (names of the library)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def aws(request: http.server.BaseHTTPRequestHandler) -> str | None:
    if request.command == "PUT" and request.path == "/latest/api/token":
        return "a-token" if request.headers["X-aws-ec2-metadata-token-ttl-seconds"] else None
    is_known = request.headers["X-aws-ec2-metadata-token"] == "a-token"
    return PUBLIC if request.path == "/latest/meta-data/public-ipv4" and is_known else None


def google(request: http.server.BaseHTTPRequestHandler) -> str | None:
    return PUBLIC if "access-configs" in request.path and request.headers["Metadata-Flavor"] == "Google" else None


def azure(request: http.server.BaseHTTPRequestHandler) -> str | None:
    return PUBLIC if "publicIpAddress" in request.path and request.headers["Metadata"] == "true" else None


@pytest.mark.parametrize(("cloud", "name"), [(aws, "AWS"), (google, "Google Cloud"), (azure, "Azure")])
def test_a_virtual_machine_asks_its_cloud(cloud: Answer, name: str) -> None:
    with http_server(cloud) as metadata:
        found = infer(PORT, maps_port=False, metadata=metadata, services=())
    assert found is not None
    assert (found.host, found.port, found.is_open) == (PUBLIC, PORT, True)
    assert name in found.how


@pytest.mark.parametrize("text", ["10.1.2.3", "<html>log in</html>", "", "::1"])
def test_answers_that_are_no_public_address_are_ignored(text: str) -> None:
    with http_server(lambda request: text) as address:
        assert infer(PORT, maps_port=False, metadata=address, services=[address]) is None


def test_a_web_service_is_believed_only_where_no_cloud_gives_an_address() -> None:
    with http_server(lambda request: PUBLIC) as service, http_server(lambda request: None) as metadata:
        found = infer(PORT, maps_port=False, metadata=metadata, services=[NOBODY, service])
        assert found is not None
        assert (found.host, found.is_open) == (PUBLIC, False)
    with http_server(lambda request: ROUTER) as service, http_server(aws) as metadata:
        found = infer(PORT, maps_port=False, metadata=metadata, services=[service])
        assert found is not None
        assert found.host == PUBLIC


@contextmanager
def server_that_sends(text: bytes, every_s: float) -> Iterator[str]:
    """Accepts connections and sends a text again and again; nothing if it is empty."""
    is_over = threading.Event()

    def send(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while not is_over.wait(every_s):
                connection.sendall(text)

    def accept() -> None:
        while not is_over.is_set():
            with contextlib.suppress(TimeoutError):
                threading.Thread(target=send, args=server.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            is_over.set()
            thread.join(5.0)


@pytest.mark.parametrize("text", [b"", b"H"])
def test_sources_that_never_answer_in_full_cost_two_seconds(text: bytes) -> None:
    with server_that_sends(text, every_s=0.2) as address:
        began = time.monotonic()
        assert infer(PORT, maps_port=False, metadata=address, services=[address, address]) is None
        assert time.monotonic() - began < 2 * SOURCE_TIMEOUT_S


def test_a_source_that_never_answers_does_not_hide_another() -> None:
    with server_that_sends(b"", every_s=0.2) as silent, http_server(lambda _: PUBLIC) as service:
        found = infer(PORT, maps_port=False, metadata=silent, services=[silent, service])
        assert found is not None
        assert found.host == PUBLIC


def test_a_port_mapping_that_comes_too_late_is_released() -> None:
    released = threading.Event()
    let_go = threading.Event()

    def late() -> PublicAddress:
        let_go.wait(10.0)
        return PublicAddress(PUBLIC, PORT, "a slow router", release=released.set)

    assert begun(late, time.monotonic() + 0.05)() is None
    let_go.set()
    assert released.wait(10.0)


DESCRIPTION = """<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0"><device>
<deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><serviceList><service>
<serviceType>urn:schemas-upnp-org:service:WANIPConnection:1</serviceType>
<serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId><controlURL>/control</controlURL>
<eventSubURL>/events</eventSubURL><SCPDURL>/scpd.xml</SCPDURL>
</service></serviceList></device></deviceList></device></deviceList></device></root>"""


class Router:
    """A router with UPnP on the loopback interface.

    Attributes:
        mappings: of ports, to hosts.
        leases: lifetimes that were asked for, in seconds.
        only_permanent: it refuses others than 0, as some routers do.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.mappings: dict[str, str] = {}
        self.leases: list[str] = []
        self.only_permanent = False

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> str | None:
        if request.command != "POST":
            return DESCRIPTION
        body = request.rfile.read(int(request.headers["Content-Length"])).decode()
        action = request.headers["SOAPAction"].strip('"').partition("#")[2]
        port = body.partition("<NewExternalPort>")[2].partition("<")[0]
        values = {}
        if action == "GetExternalIPAddress":
            values["NewExternalIPAddress"] = self.host
        elif action == "GetStatusInfo":
            values = {"NewConnectionStatus": "Connected", "NewLastConnectionError": "", "NewUptime": "9"}
        elif action == "AddPortMapping":
            self.leases.append(body.partition("<NewLeaseDuration>")[2].partition("<")[0])
            if self.only_permanent and self.leases[-1] != "0":
                return None
            self.mappings[port] = body.partition("<NewInternalClient>")[2].partition("<")[0]
        elif action == "DeletePortMapping":
            self.mappings.pop(port, None)
        elif action == "GetSpecificPortMappingEntry" and port not in self.mappings:
            return None
        elif action == "GetSpecificPortMappingEntry":
            values = {
                "NewInternalPort": port, "NewInternalClient": self.mappings[port], "NewEnabled": "1",
                "NewPortMappingDescription": "x", "NewLeaseDuration": "0",
            }  # fmt: skip
        inner = "".join(f"<{name}>{value}</{name}>" for name, value in values.items())
        kind = "urn:schemas-upnp-org:service:WANIPConnection:1"
        return (
            '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>'
            f'<u:{action}Response xmlns:u="{kind}">{inner}</u:{action}Response></s:Body></s:Envelope>'
        )


@contextmanager
def router_with(host: str) -> Iterator[Router]:
    """A router that is found by multicast on the loopback interface: one at a time, as all processes hear it."""
    pytest.importorskip("miniupnpc")
    router = Router(host)
    with (
        filelock.FileLock(Path(tempfile.gettempdir(), "manyhands-test-router.lock"), timeout=PATIENCE_S),
        http_server(router.answer) as address,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening,
    ):
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("", SSDP[1]))
        group = struct.pack("4s4s", socket.inet_aton(SSDP[0]), socket.inet_aton("127.0.0.1"))
        listening.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        listening.settimeout(0.1)
        is_over = threading.Event()

        def respond() -> None:
            while not is_over.is_set():
                try:
                    request, asker = listening.recvfrom(2048)
                except TimeoutError:
                    continue
                if b"M-SEARCH" in request:
                    kind = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
                    lines = ["HTTP/1.1 200 OK", f"ST: {kind}", f"USN: uuid:1::{kind}", f"LOCATION: {address}/d.xml"]
                    listening.sendto(("\r\n".join(lines) + "\r\n\r\n").encode(), asker)

        thread = threading.Thread(target=respond, daemon=True)
        thread.start()
        try:
            yield router
        finally:
            is_over.set()
            thread.join(5.0)


def test_a_router_maps_the_port_until_the_peer_ends() -> None:
    with router_with(ROUTER) as router:
        found = infer(PORT, metadata=NOBODY, services=(), multicast_interface="127.0.0.1", gateway=str)
        assert found is not None
        assert (found.host, found.port, found.is_open) == (ROUTER, PORT, True)
        assert router.mappings == {str(PORT): "127.0.0.1"}
        found.release()
        assert router.mappings == {}


def test_a_mapping_is_renewed_before_its_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "LEASE_S", 1)
    with router_with(ROUTER) as router:
        found = mapped_by_router(PORT, "127.0.0.1")
        assert found is not None
        deadline = time.monotonic() + 10.0
        while len(router.leases) < 3:
            assert time.monotonic() < deadline, router.leases
            time.sleep(0.05)
        found.release()
        assert router.mappings == {}
        assert set(router.leases) == {"1"}


def test_a_router_that_takes_permanent_mappings_only_gets_one() -> None:
    with router_with(ROUTER) as router:
        router.only_permanent = True
        found = mapped_by_router(PORT, "127.0.0.1")
        assert found is not None
        assert router.leases == [str(port_mapping.LEASE_S), "0"]
        assert router.mappings == {str(PORT): "127.0.0.1"}
        found.release()
        assert router.mappings == {}


def test_a_peer_that_joins_announces_the_port_that_the_router_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    undo: list[Callable[[], None]] = []
    mapped = PublicAddress(ROUTER, PORT, "the router", release=lambda: released.append("port"))
    monkeypatch.setattr(public_address, "mapped_by_router", lambda port, on_moved: mapped)
    with Peer(listen=["/ip4/0.0.0.0/tcp/0"]) as peer:
        local = peer.addresses
        if any("127.0.0.1" in address for address in local):
            pytest.skip("this machine has no other address than that of the loopback interface")
        map_port(peer, undo.append)
        deadline = time.monotonic() + 10.0
        while peer.addresses[0] != f"/ip4/{ROUTER}/tcp/{PORT}/p2p/{peer.peer_id}":
            assert time.monotonic() < deadline, peer.addresses
            time.sleep(0.01)
        assert peer.addresses[1:] == local
        undo[0]()
    assert released == ["port"]


@pytest.mark.parametrize("only_permanent", [False, True])
def test_a_router_that_restarts_with_another_address_maps_the_port_again(
    monkeypatch: pytest.MonkeyPatch, *, only_permanent: bool
) -> None:
    monkeypatch.setattr(port_mapping, "RENEW_S", 0.1)
    moved: queue.Queue[tuple[str, int]] = queue.Queue()
    with router_with(ROUTER) as router:
        router.only_permanent = only_permanent
        found = mapped_by_router(PORT, "127.0.0.1", on_moved=lambda *place: moved.put(place))
        assert found is not None
        router.host, router.mappings = PUBLIC, {}
        assert moved.get(timeout=60.0) == (PUBLIC, PORT)
        assert router.mappings == {str(PORT): "127.0.0.1"}
        router.mappings.clear()
        while not router.mappings:
            time.sleep(0.01)
        found.release()
        assert router.mappings == {}
        assert router.leases.count("0") == (2 + 1 if only_permanent else 0), "no more often than needed"
    assert moved.empty()


def test_a_peer_tells_others_the_new_address_of_its_router(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tell: queue.Queue[Callable[[str, int], None]] = queue.Queue()

    def mapped(port: int, on_moved: Callable[[str, int], None]) -> PublicAddress:
        tell.put(on_moved)
        return PublicAddress(ROUTER, PORT, "the router")

    monkeypatch.setattr(public_address, "mapped_by_router", mapped)
    with Peer(listen=["/ip4/0.0.0.0/tcp/0"]) as peer:
        local = peer.addresses
        if any("127.0.0.1" in address for address in local):
            pytest.skip("this machine has no other address than that of the loopback interface")
        map_port(peer, lambda undo: None)
        on_moved = tell.get(timeout=60.0)
        deadline = time.monotonic() + 60.0
        while peer.addresses == local:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        on_moved(PUBLIC, PORT)
        place = f"/ip4/{PUBLIC}/tcp/{PORT}/p2p/{peer.peer_id}"
        assert peer.addresses == [place, *local]
    assert f"others join with: --initial-peers {place}" in caplog.text
    on_moved(ROUTER, PORT)  # too late: nothing happens


def test_a_router_behind_another_one_has_no_public_address() -> None:
    with router_with(PRIVATE) as router:
        assert infer(PORT, metadata=NOBODY, services=(), multicast_interface="127.0.0.1", gateway=str) is None
        assert router.mappings == {}


def test_a_port_of_another_machine_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with router_with(ROUTER) as router:
        router.mappings[str(PORT)] = "192.168.1.9"
        assert infer(PORT, metadata=NOBODY, services=(), multicast_interface="127.0.0.1", gateway=str) is None
        assert router.mappings == {str(PORT): "192.168.1.9"}
    assert "to another machine, 192.168.1.9" in caplog.text


@pytest.mark.skipif(not has_namespaces(), reason="no namespaces here")
def test_a_machine_without_a_route_searches_for_no_router_and_prints_nothing() -> None:
    pytest.importorskip("miniupnpc")
    code = f"from manyhands.reach.public_address import infer; print(infer({PORT}, metadata='{NOBODY}', services=()))"
    done = subprocess.run([*UNSHARE, sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_a_mapping_that_is_not_needed_is_taken_back() -> None:
    with router_with(ROUTER) as router, http_server(aws) as metadata:
        found = infer(PORT, metadata=metadata, services=(), multicast_interface="127.0.0.1", gateway=str)
        assert found is not None
        assert found.host == PUBLIC
        assert router.mappings == {}


def test_a_first_peer_announces_what_was_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with http_server(aws) as metadata, Peer(listen=["/ip4/0.0.0.0/tcp/0"]) as peer:
        local = peer.addresses
        if any("127.0.0.1" in address for address in local):
            pytest.skip("this machine has no other address than that of the loopback interface")
        monkeypatch.setattr(public_address, "infer", lambda port, **_: infer(port, maps_port=False, metadata=metadata))
        announce_public(peer, maps_port=False)
        assert peer.addresses[0].startswith(f"/ip4/{PUBLIC}/tcp/")
        assert peer.addresses[1:] == local
    assert "No address specified. Attempting to infer address ..." in caplog.text
    assert "says the metadata service of AWS. In the local network: " in caplog.text


@pytest.mark.parametrize(
    ("maps_port", "is_installed", "is_named"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_peer_that_found_no_address_says_what_would_help(
    maps_port: bool,
    is_installed: bool,
    is_named: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(public_address, "infer", lambda *_, **__: None)
    monkeypatch.setattr("manyhands.cli.public_address.speaks_upnp", lambda: is_installed)
    with Peer(listen=["/ip4/0.0.0.0/tcp/0"]) as first:
        if any("127.0.0.1" in address for address in first.addresses):
            pytest.skip("this machine has no other address than that of the loopback interface")
        announce_public(first, maps_port=maps_port)
    assert "No public address was found" in caplog.text
    assert ("pip install 'manyhands[upnp]'" in caplog.text) is is_named


def test_an_ipv6_address_is_named_as_the_command_line_reads_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(public_address, "infer", lambda *_, **__: None)
    with Peer(listen=["/ip4/0.0.0.0/tcp/0"]) as peer:
        monkeypatch.setattr(Peer, "addresses", [str(Address.of("fd77::1", PORT))])
        announce_public(peer, maps_port=False)
    assert f"cannot join at [fd77::1]:{PORT}. " in caplog.text
    assert Address.parse(f"[fd77::1]:{PORT}").host == "fd77::1"


def test_a_peer_on_the_loopback_interface_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_address, "infer", lambda *_, **__: pytest.fail("nobody is to be asked"))
    with Peer(listen=["/ip4/127.0.0.1/tcp/0"]) as peer:
        assert announce_public(peer, maps_port=True) is None


def test_without_inference_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(public_address, "infer", lambda *_, **__: pytest.fail("nobody is to be asked"))
    caplog.set_level(logging.INFO)
    with PeerOptions(listen=("/ip4/0.0.0.0/tcp/0",), infer_address=False).connect() as peer:
        local = peer.addresses
        with Peer(local, client_mode=True):
            assert peer.addresses == local
    assert "infer" not in caplog.text
    assert "public address" not in caplog.text


async def found(*_: object) -> None:
    """A dial that succeeds."""


def test_a_peer_that_has_dialled_a_first_peer_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_address, "infer", lambda *_, **__: None)
    with Peer(listen=["/ip4/0.0.0.0/tcp/0"]) as first:
        local = first.addresses
        if any("127.0.0.1" in address for address in local):
            pytest.skip("this machine has no other address than that of the loopback interface")
        announce_public(first, maps_port=False)
        hosts = iter([PRIVATE, PUBLIC])  # as two peers saw the one that they have dialled
        monkeypatch.setattr(Reach, "_on_examine", lambda self, remote, request: ExamineResponse(0.0, next(hosts)))
        monkeypatch.setattr(Reach, "_dial", found)
        with Peer(local, client_mode=True), Peer(local, client_mode=True):
            deadline = time.monotonic() + 60.0
            while PUBLIC not in first.addresses[0]:
                assert time.monotonic() < deadline, first.addresses
                time.sleep(0.02)
        assert first.addresses[1:] == local


# addresses that the user announces


def announced(address: str, listen: str = "/ip4/127.0.0.1/tcp/0") -> Peer:
    return PeerOptions(listen=(listen,), announce=(address,)).connect()


def place_of(peer: Peer) -> str:
    return Address.parse(peer.addresses[0]).host_port


def test_an_announced_address_of_another_peer_is_refused() -> None:
    with (
        Peer(listen=["/ip4/127.0.0.1/tcp/0"]) as other,
        pytest.raises(ConfigError, match=f"--announce {place_of(other)}: another peer answers there"),
    ):
        announced(place_of(other))


def test_an_announced_address_of_a_web_server_is_refused() -> None:
    with (
        http_server(lambda _: "hello") as url,
        pytest.raises(ConfigError, match="something else answers there, which is not a manyhands peer"),
    ):
        announced(url.removeprefix("http://"))


def test_an_announced_address_that_does_not_answer_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with announced(f"localhost:{free_port()}") as peer:
        assert f"manyhands doctor --initial-peers {place_of(peer)}" in caplog.text


def test_an_announced_name_that_does_not_resolve_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"announce='nosuchhost\.invalid:31337': the name does not resolve here"):
        announced("nosuchhost.invalid:31337")


def test_an_announced_loopback_address_without_an_answer_is_refused() -> None:
    port = free_port()
    with pytest.raises(ConfigError, match=f"--announce 127.0.0.1:{port}: .* only to this machine.* not listen there"):
        announced(f"127.0.0.1:{port}")


def test_an_announced_address_that_leads_here_is_used_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with announced(f"localhost:{port}", f"/ip4/127.0.0.1/tcp/{port}") as peer:
        assert peer.addresses[0].startswith(f"/dns/localhost/tcp/{port}")
    assert "announced" not in caplog.text
