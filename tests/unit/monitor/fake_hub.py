"""As much of the Hugging Face Hub as it takes to commit a folder, behind a real socket."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeHub:
    """Keeps what was committed.

    Attributes:
        commits: the message and the files of each.
        tokens: with what somebody has written.
        refusals: so many of the next commits fail.
        goes_on: while it is cleared, no request is answered.
        num_asked: requests so far.
    """

    def __init__(self) -> None:
        self.url = ""
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        self.tokens: set[str | None] = set()
        self.refusals = 0
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.num_asked = 0

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        self.num_asked += 1
        assert self.goes_on.wait(60)
        if path == "/api/repos/create":
            name = json.loads(body)["name"]
            return 200, {"url": f"{self.url}/somebody/{name}", "name": f"somebody/{name}", "id": "1"}
        if path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            return 200, {
                "files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            }
        if path.endswith("/commit/main"):
            if self.refusals:
                self.refusals -= 1
                return 403, {"error": "this token may not write"}
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            self.commits.append((lines[0]["value"]["summary"], files))
            return 200, {"commitUrl": f"{self.url}/somebody/model/commit/1", "commitOid": "1" * 40, "success": True}
        return 404, {"error": f"no {path} here"}


class Server(ThreadingHTTPServer):
    daemon_threads = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed hears no answer."""


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            hub.tokens.add(self.headers.get("Authorization"))
            self._reply(*hub.answer(self.path.partition("?")[0], self._body()))

        def do_GET(self) -> None:
            self._reply(*hub.answer(self.path.partition("?")[0], b""))

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _reply(self, status: int, answer: Any) -> None:
            encoded = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, *arguments: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join(5.0)
