"""A thousand connections to the page of a real monitor: neither health checks nor the peer itself wait for them."""

from __future__ import annotations

import selectors
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import httpx
import pytest

from manyhands import Peer
from manyhands.cli.open_files import raise_open_files_limit
from tests.machine import Machine
from tests.process.commands import LOOPBACK, address_of, running
from tests.process.test_web_page import url_of
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.process, pytest.mark.long]

NUM_CONNECTIONS = 1000
WATCHED_S = 5.0
LONGEST_S = 0.2
"""For nine of ten answers of the page, and of the peer to another peer: on a busy machine one may take longer."""


class Crowd:
    """Connections to the page, all of them driven by one thread.

    Attributes:
        num_bytes: read from each connection so far.
        num_ended: connections that the server has ended.

    Args:
        request: sent once by each.
        more: sent by each every second, if there is any.
    """

    def __init__(self, url: str, request: bytes, more: bytes = b"") -> None:
        place = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._sockets = [socket.create_connection(place, PATIENCE_S) for _ in range(NUM_CONNECTIONS)]
        self.num_bytes = dict.fromkeys(self._sockets, 0)
        self.num_ended = 0
        self._more = more
        self._is_closing = threading.Event()
        for one in self._sockets:
            one.sendall(request)
            one.setblocking(False)
        self._thread = threading.Thread(target=self._go_on)
        self._thread.start()

    def _go_on(self) -> None:
        due_at = 0.0
        with selectors.DefaultSelector() as selector:
            for one in self._sockets:
                selector.register(one, selectors.EVENT_READ)
            while not self._is_closing.is_set():
                for key, _ in selector.select(0.1):
                    one = key.fileobj
                    assert isinstance(one, socket.socket)
                    if not self._read(one):
                        selector.unregister(one)
                        self.num_ended += 1
                if self._more and time.monotonic() >= due_at:
                    due_at = time.monotonic() + 1.0
                    for key in list(selector.get_map().values()):
                        self._send(key.fileobj)

    def _read(self, one: socket.socket) -> bool:
        try:
            got = len(one.recv(1 << 16))
        except ConnectionResetError:
            return False
        self.num_bytes[one] += got
        return got > 0

    def _send(self, one: object) -> None:
        assert isinstance(one, socket.socket)
        with suppress(ConnectionResetError, BrokenPipeError):  # its end is read next
            one.send(self._more)

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()
        for one in self._sockets:
            one.close()


def nine_tenths(seconds: list[float]) -> float:
    """The time within which nine of ten are."""
    return statistics.quantiles(seconds, n=10)[-1]


@contextmanager
def watched_monitor() -> Iterator[tuple[str, Callable[[], tuple[float, float, float]]]]:
    """A monitor; gives the address of its page, and what measures for how long the page, and the peer, are waited for:
    the longest time of nine in ten. It also says how long that may be."""
    raise_open_files_limit()
    with running("monitor", "--run-id", "seen", "--listen", LOOPBACK, "--web", "127.0.0.1:0") as monitor:
        address, url = address_of(monitor), url_of(monitor)
        with (
            Peer([address], client_mode=True) as other,
            httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as client,
        ):
            assert client.get("/healthz").status_code == 200  # this connection stays

            def longest_waits() -> tuple[float, float, float]:
                of_page, of_peer, end = [], [], time.monotonic() + WATCHED_S
                with Machine() as machine:
                    while time.monotonic() < end:
                        began = time.monotonic()
                        assert client.get("/healthz").status_code == 200
                        answered = time.monotonic()
                        other.get("a key")
                        of_page.append(answered - began)
                        of_peer.append(time.monotonic() - answered)
                        time.sleep(0.05)
                return nine_tenths(of_page), nine_tenths(of_peer), machine.allows(LONGEST_S)

            yield url, longest_waits


def test_a_thousand_that_ask_slowly_are_ended_and_hold_up_nobody() -> None:
    with watched_monitor() as (url, longest_waits):
        slow = Crowd(url, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", b"x")
        with closing(slow):
            of_page, of_peer, longest_s = longest_waits()
            assert slow.num_ended == 0
            wait_until(lambda: slow.num_ended == NUM_CONNECTIONS, "all of them are ended")
    assert max(of_page, of_peer) < longest_s, (of_page, of_peer)


def test_a_thousand_open_pages_hold_up_nobody() -> None:
    with watched_monitor() as (url, longest_waits):
        pages = Crowd(url, b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with closing(pages):
            wait_until(lambda: min(pages.num_bytes.values()) >= 500, "all of them are open")
            of_page, of_peer, longest_s = longest_waits()
            assert pages.num_ended == 0
            assert f'manyhands_open_pages{{run_id="seen"}} {float(NUM_CONNECTIONS)}' in httpx.get(f"{url}/metrics").text
            assert httpx.get(f"{url}/events").status_code == 503
    assert max(of_page, of_peer) < longest_s, (of_page, of_peer)
