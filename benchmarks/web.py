"""Cost of the page of a run: CPU and bytes of its server, for so many peers and so many open pages.

    python benchmarks/web.py --peers 10,200,2000 --clients 1,100 [--json FILE]

The server is the one of ``manyhands monitor --web``, in a separate process with a made-up run instead of a network. The
run is looked at once a second, makes a global step every 40 s, and all peers train, so all rows of the table change at
each step. The clients are connections in another process that read the stream of updates and drop it.

The figures:

  peers, clients
  server_cpu_share       of one core, by the thread of the server alone: a share of 0.02 is 2%
  bytes_per_s_per_client of the stream, after the first picture
  first_bytes            that each client gets at its start: the whole table of peers and the leaderboard
  first_paint_ms         from the request for the page until Chromium has drawn it; null without a browser
  db_mb_per_day          growth of the history in --state-dir, with a step every 40 s and all peers in each; what it
                         keeps of credit has a limit, about 50 MB
"""

from __future__ import annotations

import argparse
import hashlib
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from _command_line import Parser, json_path, positive, progress_of, run, write_json
from _worker import Worker

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the made-up run and the browser of the tests

from manyhands.averaging.messages import SHORT_ID_BYTES
from manyhands.monitor.credit import Changes, CreditedStep
from manyhands.monitor.history import History
from manyhands.monitor.picture import Point
from manyhands.monitor.web import bind
from manyhands.monitor.web.server import PageServer
from manyhands.optim.metrics import packed
from tests.synthetic_run import STEP_S, SyntheticRun

LOOK_PERIOD_S = 1.0
SETTLE_S = 3.0
PATIENCE_S = 60.0
DAY_S = 86400.0
MB = 1e6


class Served:
    """A made-up run and its page, in one process."""

    def __init__(self, num_peers: int) -> None:
        self._run = SyntheticRun(num_peers, time.time(), past_steps=100 if num_peers > 500 else 1000)
        self._server = PageServer(self._run, bind("127.0.0.1:0"))
        self._server.start()
        self._is_closing = threading.Event()
        self._looking = threading.Thread(target=self._look_forever)
        self._looking.start()

    def _look_forever(self) -> None:
        while not self._is_closing.wait(LOOK_PERIOD_S):
            self._run.advance(LOOK_PERIOD_S)

    def url(self) -> str:
        return self._server.url

    def cpu_s(self) -> float:
        """CPU seconds of the server's thread so far."""
        return thread_cpu_s("manyhands page")

    def close(self) -> None:
        self._is_closing.set()
        self._looking.join()
        self._server.close()


def thread_cpu_s(name: str) -> float:
    """CPU seconds of a thread of this process."""
    thread = next(thread for thread in threading.enumerate() if thread.name == name)
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


class Clients:
    """Connections that read the stream, in one process."""

    def __init__(self, port: int, number: int) -> None:
        self._sockets = [socket.create_connection(("127.0.0.1", port), PATIENCE_S) for _ in range(number)]
        self._num_bytes = 0
        self._is_closing = threading.Event()
        for one in self._sockets:
            one.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            one.setblocking(False)
        self._reading = threading.Thread(target=self._read_forever)
        self._reading.start()

    def _read_forever(self) -> None:
        with selectors.DefaultSelector() as selector:
            for one in self._sockets:
                selector.register(one, selectors.EVENT_READ)
            while not self._is_closing.is_set():
                for key, _ in selector.select(0.2):
                    got = key.fileobj.recv(1 << 20)  # type: ignore[union-attr] # a socket
                    self._num_bytes += len(got)
                    if not got:
                        selector.unregister(key.fileobj)

    def num_bytes(self) -> int:
        """Bytes read so far, by all."""
        return self._num_bytes

    def close(self) -> None:
        self._is_closing.set()
        self._reading.join()
        for one in self._sockets:
            one.close()


@contextmanager
def browser() -> Iterator[Any]:
    """A browser; None if there is none here."""
    try:
        from tests.browser import chromium, found_chromium
    except ModuleNotFoundError:  # Playwright is a tool of the tests
        yield None
        return
    if found_chromium() is None:
        yield None
        return
    with chromium() as found:
        yield found


def first_paint_ms(browser: Any, url: str) -> float:
    """Milliseconds until a browser has drawn something of the page, with nothing in its cache."""
    page = browser.new_page()
    page.goto(url)
    page.locator("#peers tbody tr").first.wait_for()
    painted: float = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.close()
    return round(painted, 1)


def db_mb_per_day(num_peers: int) -> float:
    """Growth of the history, from a tenth of a day that is written as fast as it can be."""
    num_steps = round(DAY_S / STEP_S / 10)
    peers = [hashlib.sha256(str(number).encode()).digest()[:SHORT_ID_BYTES] for number in range(num_peers)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.db"
        History("benchmark", path).close()
        before = path.stat().st_size
        with closing(History("benchmark", path)) as history:
            for step in range(1, num_steps + 1):
                shares = packed({peer: 1000 + (step * place) % 777 for place, peer in enumerate(peers)})
                credited = CreditedStep(step, step.to_bytes(8, "big"), num_peers, shares)
                point = Point(time=STEP_S * step, step=step, loss=1 / step, samples=1000 * num_peers, peers=num_peers)
                history.add_points([point])
                history.add_credit(Changes(put=[credited]))
                history.flush()
        growth = path.stat().st_size - before
    return round(10 * growth / MB, 2)


def measure(num_peers: int, num_clients: int, seconds: float, browser: Any) -> dict[str, Any]:
    """One row: start both processes, let them settle, and read their counters twice."""
    with closing(Worker(Served, num_peers)) as served:
        url = served.call("url", timeout_s=PATIENCE_S)
        with closing(Worker(Clients, int(url.rpartition(":")[2]), num_clients)) as clients:
            time.sleep(SETTLE_S)
            first_bytes, cpu_s, began = clients.call("num_bytes"), served.call("cpu_s"), time.monotonic()
            time.sleep(seconds)
            wall_s = time.monotonic() - began
            num_bytes, cpu_s = clients.call("num_bytes") - first_bytes, served.call("cpu_s") - cpu_s
        return {
            "peers": num_peers,
            "clients": num_clients,
            "server_cpu_share": round(cpu_s / wall_s, 4),
            "bytes_per_s_per_client": round(num_bytes / wall_s / num_clients),
            "first_bytes": round(first_bytes / num_clients),
            "first_paint_ms": first_paint_ms(browser, url) if browser is not None else None,
            "db_mb_per_day": db_mb_per_day(num_peers),
        }


def numbers(text: str) -> list[int]:
    """Whole numbers above zero, with commas between them."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers above 0, such as 10,200")
    return [int(part) for part in parts]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--peers", type=numbers, default=[10, 200, 2000])
    parser.add_argument("--clients", type=numbers, default=[1, 100])
    parser.add_argument("--seconds", type=positive, default=45.0, help="of each measurement; more than one global step")
    parser.add_argument("--json", type=json_path, help="write the figures here as well")
    options = parser.parse_args()
    cases = [(peers, clients) for peers in options.peers for clients in options.clients]
    rows = []
    with browser() as found, progress_of(len(cases)) as steps:
        for peers, clients in cases:
            steps.begin(f"{peers} peers, {clients} clients")
            rows.append(measure(peers, clients, options.seconds, found))
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    write_json(options.json, rows)


if __name__ == "__main__":
    run(main)
