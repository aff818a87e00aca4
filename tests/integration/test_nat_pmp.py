"""A router with NAT-PMP, faked at its socket."""

from __future__ import annotations

import functools
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from manyhands.base.errors import Unavailable
from manyhands.reach import nat_pmp, port_mapping, public_address
from manyhands.reach.nat_pmp import NatPmpRouter, default_gateway
from manyhands.reach.port_mapping import PortMapping
from manyhands.reach.public_address import infer

PORT = 31337
PUBLIC, PRIVATE = "198.51.45.7", "10.0.0.5"
NOBODY = "http://127.0.0.1:9"


class Router:
    """Answers as RFC 6886 says.

    Attributes:
        host: its public address.
        result: of each request; 0 for success.
        num_lost: requests that get no answer.
        offset: from the port that is asked for to the one that is mapped.
        lifetime_s: of mappings.
        mappings: public ports, to those of the machine.
        asked: the port and the lifetime in each request for a mapping.
    """

    def __init__(self) -> None:
        self.host = PUBLIC
        self.result = self.num_lost = self.offset = 0
        self.lifetime_s = 7200
        self.mappings: dict[int, int] = {}
        self.asked: list[tuple[int, int]] = []

    def answer(self, request: bytes) -> bytes | None:
        if self.num_lost > 0:
            self.num_lost -= 1
            return None
        assert request[0] == 0, "the version"
        start = struct.pack("!BBHI", 0, 128 + request[1], self.result, 99)
        if request == b"\0\0":
            return start + socket.inet_aton(self.host)
        assert request[1] == 2, "TCP"
        _, own, port, lifetime_s = struct.unpack("!HHHI", request[2:])
        self.asked.append((port, lifetime_s))
        if not lifetime_s:
            assert port == 0
            self.mappings = {mapped: inner for mapped, inner in self.mappings.items() if inner != own}
            return start + struct.pack("!HHI", own, 0, 0)
        self.mappings[port + self.offset] = own
        return start + struct.pack("!HHI", own, port + self.offset, self.lifetime_s)


@contextmanager
def serving(host: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[Router, int]]:
    """A router on the loopback interface, and its port."""
    router, is_over = Router(), threading.Event()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind((host, port))
        listening.settimeout(0.05)

        def serve() -> None:
            while not is_over.is_set():
                try:
                    request, asker = listening.recvfrom(64)
                except TimeoutError:
                    continue
                if (answer := router.answer(request)) is not None:
                    listening.sendto(answer, asker)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield router, listening.getsockname()[1]
        finally:
            is_over.set()
            thread.join(5.0)


@pytest.mark.parametrize("num_lost", [0, 1])
def test_a_port_is_mapped_until_it_is_released(num_lost: int) -> None:
    with serving() as (router, server_port):
        router.num_lost, router.offset = num_lost, 5
        mapping = PortMapping(NatPmpRouter(lambda: "127.0.0.1", PORT, server_port))
        assert (mapping.host, mapping.port) == (PUBLIC, PORT + 5)
        assert router.mappings == {PORT + 5: PORT}
        mapping.release()
        assert router.mappings == {}


def test_a_mapping_is_renewed_after_half_of_its_lifetime() -> None:
    with serving() as (router, server_port):
        router.lifetime_s = 2
        mapping = PortMapping(NatPmpRouter(lambda: "127.0.0.1", PORT, server_port))
        deadline = time.monotonic() + 60.0
        while len(router.asked) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        mapping.release()
        *renewed, released = router.asked
        assert set(renewed) == {(PORT, nat_pmp.LIFETIME_S)}
        assert released == (0, 0)


def test_a_router_that_restarts_with_another_address_maps_the_port_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(port_mapping, "RENEW_S", 0.1)
    moved: queue.Queue[tuple[str, int]] = queue.Queue()
    with serving() as (router, server_port):
        mapping = PortMapping(NatPmpRouter(lambda: "127.0.0.1", PORT, server_port), lambda *place: moved.put(place))
        router.result = 3  # it has no address yet
        while "did not renew" not in caplog.text:
            time.sleep(0.01)
        router.host, router.offset, router.mappings = "198.51.45.8", 5, {}
        router.result = 0
        assert moved.get(timeout=60.0) == ("198.51.45.8", PORT + 5)
        assert router.mappings[PORT + 5] == PORT
        mapping.release()
        assert router.mappings == {}
    assert moved.empty()
    assert caplog.text.count("did not renew") == 1, "told once"


def test_after_a_move_the_router_there_maps_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "RENEW_S", 0.1)
    gateways = ["127.0.0.1"]
    moved: queue.Queue[tuple[str, int]] = queue.Queue()
    with serving() as (_, server_port), serving("127.0.0.2", server_port) as (router, _):
        router.host = "198.51.45.8"
        mapping = PortMapping(NatPmpRouter(lambda: gateways[-1], PORT, server_port), lambda *place: moved.put(place))
        gateways.append("127.0.0.2")
        assert moved.get(timeout=60.0) == ("198.51.45.8", PORT)
        mapping.release()
        assert router.mappings == {}


def test_a_router_that_refuses_is_named_with_its_reason() -> None:
    with serving() as (router, server_port):
        router.result = 2
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1 refuses: NAT-PMP is turned off"):
            PortMapping(NatPmpRouter(lambda: "127.0.0.1", PORT, server_port))


def test_a_router_that_never_answers_costs_two_seconds() -> None:
    with serving() as (router, server_port):
        router.num_lost = 100
        began = time.monotonic()
        with pytest.raises(Unavailable, match="does not answer NAT-PMP"):
            PortMapping(NatPmpRouter(lambda: "127.0.0.1", PORT, server_port))
        assert time.monotonic() - began < 10.0


def test_a_router_that_does_not_listen_is_given_up_at_once() -> None:
    with serving() as (_, server_port):
        pass
    with pytest.raises(Unavailable, match="does not speak NAT-PMP"):
        PortMapping(NatPmpRouter(lambda: "127.0.0.1", PORT, server_port))
    with pytest.raises(Unavailable, match="does not speak NAT-PMP"):
        PortMapping(NatPmpRouter(lambda: "255.255.255.255", PORT))  # as without a network, no packet leaves


@pytest.mark.parametrize(("host", "is_found"), [(PUBLIC, True), (PRIVATE, False)])
def test_a_first_peer_asks_its_router(host: str, is_found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping.importlib.util, "find_spec", lambda name: None)  # without UPnP
    with serving() as (router, server_port):
        router.host = host
        monkeypatch.setattr(public_address, "NatPmpRouter", functools.partial(NatPmpRouter, server_port=server_port))
        found = infer(PORT, metadata=NOBODY, services=(), gateway=lambda: "127.0.0.1")
        assert (found is not None) == is_found
        if found is not None:
            assert (found.host, found.port, found.is_open) == (PUBLIC, PORT, True)
            assert "NAT-PMP" in found.how
            found.release()
        assert router.mappings == {}


def test_the_gateway_is_that_of_the_default_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    routes = tmp_path / "route"
    monkeypatch.setattr(nat_pmp, "ROUTES", routes)
    assert default_gateway() == ""
    heading = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    local = "eth0 0001A8C0 00000000 0001 0 0 100 00FFFFFF 0 0 0\n"
    routes.write_text(heading + local)
    assert default_gateway() == ""
    routes.write_text(heading + local + "eth0 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0\n")
    assert default_gateway() == "192.168.1.1"
