"""Prepared data, and a real HTTP server for it, to which everything can be done that servers do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from manyhands.recipes.albert.data.preparation import Preparation
from manyhands.recipes.albert.data.prepare import prepare
from tests.unit.recipes.texts import write_book

NUM_SHARDS = 4


def make_data(folder: Path) -> Path:
    """The folder ``data``, with shards; beside it ``data.tar.gz``."""
    book = write_book(folder / "book.txt")
    prepare(
        Preparation(
            text=(book,), train_tokenizer=True, vocab_size=600, seq_length=32, num_proc=1,
            output=folder / "data", shards=NUM_SHARDS, archive=folder / "data.tar.gz",
        )
    )  # fmt: skip
    return folder / "data"


class Handler(BaseHTTPRequestHandler):
    """Ranges, and whatever goes wrong."""

    def __init__(self, host: Host, *args) -> None:
        self.host = host
        super().__init__(*args)

    def do_GET(self) -> None:
        name = self.path.removeprefix("/")
        given = self.headers.get("Range")
        self.host.requests.append((name, given))
        if self.host.is_down or not (self.host.folder / name).is_file():
            self.send_error(503)
            return
        if name.startswith(self.host.hangs_at):
            self.host.is_over.wait(120)
            return
        data = self.host.changed(name, (self.host.folder / name).read_bytes())
        start = int(given.split("=")[1].rstrip("-")) if given and self.host.has_ranges else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if name.endswith((".arrow", ".tar.gz")) and self.host.cut_after is not None:
            data = data[: start + self.host.cut_after]
            self.close_connection = True
        time.sleep(self.host.pause_s)
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data[start:])

    def log_message(self, *args) -> None:
        pass


class Host:
    def __init__(self, folder: Path) -> None:
        self.folder, self.requests = folder, []
        self.hangs_at: tuple[str, ...] = ()
        self.is_over = threading.Event()
        self.is_down, self.has_ranges, self.cut_after, self.pause_s = False, True, None, 0.0
        self.changed: Callable[[str, bytes], bytes] = lambda name, data: data
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, self))
        self.url = f"http://127.0.0.1:{self.server.server_port}/index.json"

    def names(self) -> list[str]:
        return [name for name, _ in self.requests if name.startswith("train")]


@contextmanager
def hosting(folder: Path) -> Iterator[Host]:
    host = Host(folder)
    thread = threading.Thread(target=host.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield host
    finally:
        host.is_over.set()
        host.server.shutdown()
        host.server.server_close()
        thread.join()
