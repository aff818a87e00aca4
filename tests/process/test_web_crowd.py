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
MOST_S = 0.2
"""For nine of ten answers of the page, and of the peer to another peer."""
LONGEST_S = 2.0
"""For each: a busy machine may hold one up."""


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


class Waits:
    """How long the page, and the peer, let others wait.

    Attributes:
        of_page, of_peer: seconds of each answer.
        most_s, longest_s: bounds, for nine of ten and for all, by what this machine allowed meanwhile.
    """

    def __init__(self, client: httpx.Client, other: Peer) -> None:
        self.of_page: list[float] = []
        self.of_peer: list[float] = []
        end = time.monotonic() + WATCHED_S
        with Machine() as machine:
            while time.monotonic() < end:
                began = time.monotonic()
                assert client.get("/healthz").status_code == 200
                answered = time.monotonic()
                other.get("a key")
                self.of_page.append(answered - began)
                self.of_peer.append(time.monotonic() - answered)
                time.sleep(0.05)
            self.most_s, self.longest_s = machine.allows(MOST_S), machine.allows(LONGEST_S)

    def check(self) -> None:
        for seconds in (self.of_page, self.of_peer):
            assert statistics.quantiles(seconds, n=10)[-1] < self.most_s, sorted(seconds)
            assert max(seconds) < self.longest_s


@contextmanager
def watched_monitor() -> Iterator[tuple[str, Callable[[], Waits]]]:
    """A monitor; gives the address of its page, and what measures for how long page and peer are waited for."""
    raise_open_files_limit()
    with running("monitor", "--run-id", "seen", "--listen", LOOPBACK, "--web", "127.0.0.1:0") as monitor:
        address, url = address_of(monitor), url_of(monitor)
        with (
            Peer([address], client_mode=True) as other,
            httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as client,
        ):
            assert client.get("/healthz").status_code == 200  # this connection stays
            yield url, lambda: Waits(client, other)


def test_a_thousand_that_ask_slowly_are_ended_and_hold_up_nobody() -> None:
    with watched_monitor() as (url, wait_for_answers):
        slow = Crowd(url, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", b"x")
        with closing(slow):
            waits = wait_for_answers()
            assert slow.num_ended == 0
            wait_until(lambda: slow.num_ended == NUM_CONNECTIONS, "all of them are ended")
    waits.check()


def test_a_thousand_open_pages_hold_up_nobody() -> None:
    with watched_monitor() as (url, wait_for_answers):
        pages = Crowd(url, b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with closing(pages):
            wait_until(lambda: min(pages.num_bytes.values()) >= 500, "all of them are open")
            waits = wait_for_answers()
            assert pages.num_ended == 0
            assert f'manyhands_open_pages{{run_id="seen"}} {float(NUM_CONNECTIONS)}' in httpx.get(f"{url}/metrics").text
            assert httpx.get(f"{url}/events").status_code == 503
    waits.check()
