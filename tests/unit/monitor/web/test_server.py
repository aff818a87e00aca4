"""The server of the page over real HTTP, on a made-up run."""

from __future__ import annotations

import csv
import errno
import io
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from manyhands.base.errors import ConfigError
from manyhands.monitor.picture import LeaderboardRow, PeerRow, Point, RunEvent, RunPicture
from manyhands.monitor.web import Filled, Guess, bind
from manyhands.monitor.web.page_files import page_files
from manyhands.monitor.web.server import PageServer
from manyhands.transport.http_connections import public_source
from tests.machine import Machine
from tests.synthetic_run import STEP_S, SyntheticRun

LOCAL = "127.0.0.1:0"


class Served:
    """A run, its page, and a client.

    Attributes:
        client: of the page's address.
    """

    def __init__(self) -> None:
        self.run = SyntheticRun(12, time.time(), past_steps=30)
        self.server = PageServer(self.run, bind(LOCAL), fill, join="manyhands join <host>:31337")
        self.server.start()
        self.client = httpx.Client(base_url=self.server.url, trust_env=False)

    def get(self, path: str) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self) -> SseReader:
        return SseReader(self.client)


class SseReader:
    """Server-sent events as a browser reads them."""

    def __init__(self, client: httpx.Client) -> None:
        self._context = client.stream("GET", "/events", timeout=60.0)
        answer = self._context.__enter__()
        assert answer.headers["content-type"].startswith("text/event-stream")
        self._lines = answer.iter_lines()

    def next(self, wanted: str) -> Any:
        """The data of the next event of this name."""
        name = ""
        for line in self._lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name == wanted:
                return json.loads(line.removeprefix("data: "))
        raise AssertionError("the stream has ended")

    def has_ended(self) -> bool:
        for _ in self._lines:
            pass
        return True

    def close(self) -> None:
        self._context.__exit__(None, None, None)


def fill(text: str) -> Filled:
    if "[MASK]" not in text:
        raise ConfigError("the text has no [MASK]")
    return Filled(text.replace("[MASK]", "paris"), [[Guess("paris", 0.5)]])


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.client.close()
    served.server.close()


def test_json_of_the_run_decodes_to_the_picture(served: Served) -> None:
    picture = served.run.picture()
    head = served.get("/api/run.json")
    assert head["step"] == 30
    assert head["version"] == 1
    assert "peers" not in head
    assert msgspec.convert(head, RunPicture).last == picture.last
    assert msgspec.convert(served.get("/api/peers.json")["peers"], list[PeerRow]) == picture.peers
    assert msgspec.convert(served.get("/api/leaders.json")["leaders"], list[LeaderboardRow]) == picture.leaders


def test_credit_in_the_api_adds_up_to_the_committed_samples(served: Served) -> None:
    committed = served.get("/api/run.json")["committed_samples"]
    assert committed > 0
    assert sum(row["samples"] for row in served.get("/api/peers.json")["peers"]) == committed
    assert sum(leader["samples"] for leader in served.get("/api/leaders.json")["leaders"]) == committed
    assert sum(point["samples"] for point in served.get("/api/points.json")["points"]) == committed


def test_points_since_a_time_are_thinned_to_the_limit(served: Served) -> None:
    points = msgspec.convert(served.get("/api/points.json")["points"], list[Point])
    assert [point.step for point in points] == list(range(1, 31))
    since = points[19].time
    assert [point["step"] for point in served.get(f"/api/points.json?since={since}")["points"]] == list(range(20, 31))
    few = served.get("/api/points.json?limit=4")["points"]
    assert len(few) == 4
    assert few[-1]["step"] == 30
    assert few[-1]["heldout_loss"] == points[24].heldout_loss  # of step 25, which the last of the four stands for


def test_points_are_read_once_for_all_pages_until_the_next_look(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, int]] = []
    points = served.run.points

    def counted(since: float, limit: int) -> list[Point]:
        asked.append((since, limit))
        return points(since, limit)

    monkeypatch.setattr(served.run, "points", counted)
    with ThreadPoolExecutor(10) as pages:
        answers = list(pages.map(served.get, ["/api/points.json?limit=20"] * 10))
    assert all(answer == answers[0] for answer in answers)
    assert asked == [(0.0, 20)]
    served.run.advance(STEP_S)
    assert served.get("/api/points.json?limit=20")["points"][-1]["step"] == 31
    for limit in range(1, 30):  # others have their own answers
        assert len(served.get(f"/api/points.json?limit={limit}")["points"]) == limit


def test_peers_are_encoded_once_for_all_programs_until_the_next_look(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = msgspec.json.encode

    def counted(content: Any, **options: Any) -> bytes:
        encoded.extend({"peers"} & content.keys())
        return encode(content, **options)

    monkeypatch.setattr(msgspec.json, "encode", counted)
    answers = [served.get("/api/peers.json") for _ in range(5)]
    assert all(answer == answers[0] for answer in answers)
    assert encoded == ["peers"]
    served.run.add_peer("newcomer")
    assert "newcomer" in [row["name"] for row in served.get("/api/peers.json")["peers"]]
    assert encoded == ["peers", "peers"]


@pytest.mark.parametrize("query", ["limit=0", "limit=many", "limit=1e9", "since=-1", "since=nan"])
def test_bad_parameter_is_refused_with_its_bounds(served: Served, query: str) -> None:
    answer = served.client.get(f"/api/points.json?{query}")
    assert answer.status_code == 400
    assert query.partition("=")[0] in answer.json()["error"]


def test_the_api_gives_the_leader_entry_of_a_peer_beyond_the_leaderboard(served: Served) -> None:
    peer_id = served.run.picture().peers[-1].peer_id
    assert peer_id in served.get(f"/api/leader.json?peer={peer_id}")["leader"]["peer_ids"]
    assert served.get("/api/leader.json?peer=nobody")["leader"] is None


def test_csv_gives_back_the_rows_and_disarms_formulas(served: Served) -> None:
    evil = '=HYPERLINK("http://x","click"),\n"'
    served.run.add_peer(evil)
    answer = served.client.get("/api/peers.csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert [row["peer_id"] for row in rows] == [row.peer_id for row in served.run.picture().peers]
    assert [row["name"] for row in rows if "HYPERLINK" in row["name"]] == ["'" + evil]
    points = list(csv.DictReader(io.StringIO(served.client.get("/api/points.csv").text)))
    assert [int(point["step"]) for point in points] == list(range(1, 31))
    assert points[0]["heldout_loss"] == ""


def test_the_api_names_the_unit_of_credit(served: Served) -> None:
    served.run.unit = "tokens"
    served.run.advance(1.0)
    assert served.get("/api/run.json")["unit"] == "tokens"
    assert served.get("/api/peers.json")["unit"] == "tokens"
    for table in ("peers", "points"):
        rows = csv.DictReader(io.StringIO(served.client.get(f"/api/{table}.csv").text))
        assert {row["unit"] for row in rows} == {"tokens"}
    assert (
        'manyhands_committed_samples_total{run_id="albert-together",unit="tokens"}'
        in served.client.get("/metrics").text
    )


@pytest.mark.long
def test_points_of_a_long_history_are_read_when_the_browser_takes_them(served: Served) -> None:
    served.run.repeat_points(100_000)  # 8 MB, more than the system keeps for a connection
    with served.client.stream("GET", "/api/points.csv", timeout=60.0) as answer:
        parts = answer.iter_bytes()
        head = next(parts)
        time.sleep(1.0)
        assert served.run.num_read < 100_000
        num_lines = head.count(b"\n") + sum(part.count(b"\n") for part in parts)
    assert num_lines == 1 + 100_000
    before = served.run.num_read
    assert served.client.head("/api/points.csv").status_code == 200
    assert served.run.num_read == before


def test_metrics_are_read_by_the_parser_of_prometheus(served: Served) -> None:
    picture = served.run.picture()
    served.run.set_state(picture.peers[0].peer_id, "gone")
    text = served.client.get("/metrics").text
    samples = {
        (sample.name, sample.labels.get("state")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["run_id"] == picture.run_id
    }
    assert samples["manyhands_step", None] == 30
    assert samples["manyhands_committed_samples_total", None] == picture.committed_samples
    assert samples["manyhands_rounds_aborted_total", None] == served.run.num_aborted
    assert samples["manyhands_loss", None] == picture.last.loss  # type: ignore[union-attr]
    assert samples["manyhands_peers", "gone"] == 1
    assert samples["manyhands_peers", "training"] == 11
    assert ("manyhands_heldout_loss", None) not in samples  # nobody measured the last step


def test_health_follows_the_time_of_the_last_look(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.client.get("/healthz").status_code == 200
    looked_at = served.run.picture().time
    monkeypatch.setattr("manyhands.monitor.web.app.time.time", lambda: looked_at + 61)
    answer = served.client.get("/healthz")
    assert answer.status_code == 503
    assert "61 s" in answer.text


def test_stream_begins_with_the_picture_and_goes_on_with_changes(served: Served) -> None:
    stream = served.events()
    first = stream.next("run")
    whole = stream.next("peers")
    assert first["step"] == 30
    assert whole["whole"]
    assert len(whole["rows"]) == 12
    assert stream.next("leaders")
    newcomer = served.run.add_peer("newcomer")
    changes = stream.next("peers")
    assert not changes["whole"]
    assert [dict(zip(changes["columns"], row, strict=True))["peer_id"] for row in changes["rows"]] == [newcomer]
    served.run.advance(STEP_S)
    assert stream.next("run")["step"] == 31
    stream.close()


def test_closing_ends_open_streams_within_a_second(served: Served) -> None:
    streams = [served.events() for _ in range(3)]
    for stream in streams:
        stream.next("run")
    with Machine() as machine:
        began = time.monotonic()
        served.server.close()
        took_s = time.monotonic() - began
    assert took_s < machine.allows(1.0)
    assert all(stream.has_ended() for stream in streams)
    with pytest.raises(httpx.ConnectError):
        served.client.get("/healthz")


def test_pages_beyond_the_bound_are_refused_and_health_still_answers(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.monitor.web.app.MAX_STREAMS", 2)
    streams = [served.events() for _ in range(2)]
    for stream in streams:
        stream.next("run")
    refused = served.client.get("/events")
    assert refused.status_code == 503
    assert served.client.get("/healthz").status_code == 200
    streams[0].close()
    deadline = time.monotonic() + 60.0
    while served.client.get("/metrics").text.count("open_pages{") and time.monotonic() < deadline:
        if 'open_pages{run_id="albert-together"} 1.0' in served.client.get("/metrics").text:
            break
    again = served.events()
    assert again.next("run")["step"] == 30
    again.close()
    streams[1].close()


def test_connections_beyond_the_bound_get_503_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.transport.http_connections.MAX_CONNECTIONS", 2)
    port = int(served.server.url.rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port), 60.0) for _ in range(2)]
    with socket.create_connection(("127.0.0.1", port), 60.0) as third:
        assert third.recv(100).startswith(b"HTTP/1.1 503 ")
    for connection in silent:
        connection.close()


def test_one_address_has_a_part_of_the_connections(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.transport.http_connections.MAX_CONNECTIONS_PER_ADDRESS", 1)
    port = int(served.server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 60.0), socket.create_connection(("127.0.0.1", port), 60.0):
        assert served.client.get("/healthz").status_code == 200, "a reverse proxy has no limit"
    monkeypatch.setattr("manyhands.transport.http_connections.public_source", lambda client: client[0])
    one = socket.create_connection(("127.0.0.1", port), 60.0)
    with one, socket.create_connection(("127.0.0.1", port), 60.0) as two:
        assert two.recv(100).startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("8.8.8.8", "8.8.8.8"),
        ("2606:4700::1:2", "2606:4700::/64"),
        ("::ffff:8.8.8.8", "8.8.8.8"),
        ("127.0.0.1", None),
        ("192.168.1.7", None),
        ("a proxy", None),
    ],
)
def test_public_addresses_have_a_limit_of_connections(host: str, source: str | None) -> None:
    assert public_source((host, 1)) == source
    assert public_source(None) is None


def test_connection_that_asks_nothing_is_ended(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.transport.http_connections.REQUEST_TIMEOUT_S", 0.1)
    port = int(served.server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 60.0) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\n")  # and never the rest
        assert silent.recv(1) == b""  # its end


@pytest.mark.parametrize(
    "head",
    [b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"],
)
def test_connection_that_asks_slowly_after_an_answer_is_ended(
    served: Served, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr("manyhands.transport.http_connections.REQUEST_TIMEOUT_S", 1.0)
    port = int(served.server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 60.0) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in slow.recv(4096)
        slow.sendall(head)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_for(slow, 60.0)


def test_browser_that_reads_nothing_is_disconnected(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.transport.http_connections.UNREAD_TIMEOUT_S", 0.1)
    lazy = socket.socket()
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lazy.connect(("127.0.0.1", int(served.server.url.rpartition(":")[2])))
    script = served.client.get("/").text.split('src="')[2].partition('"')[0]
    lazy.sendall(f"GET {script} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 200)
    with lazy, pytest.raises((ConnectionResetError, BrokenPipeError)):
        send_for(lazy, 60.0)


def send_for(connection: socket.socket, seconds: float) -> None:
    """Send a byte now and then."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        connection.sendall(b"x")
        time.sleep(0.05)


@pytest.mark.parametrize("path", ["/", "/events", "/api/run.json", "/metrics", "/healthz", "/nothing"])
def test_only_reading_is_possible_and_every_answer_is_guarded(served: Served, path: str) -> None:
    head = served.client.head(path)
    assert head.status_code == (404 if path == "/nothing" else 200)
    assert head.content == b""
    assert head.headers.get("x-accel-buffering") == ("no" if path == "/events" else None)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = served.client.request(method, path)
        assert answer.status_code in (404, 405)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(("host", "status"), [
    ("127.0.0.1:9000", 200), ("localhost", 200), ("[::1]:8080", 200), ("127.0.0.2:8080", 200),
    ("10.0.0.1:8080", 421),
    ("rebound.example:8080", 421), ("127.0.0.1.example", 421), ("", 421),
])  # fmt: skip
def test_names_of_other_hosts_are_refused_on_loopback(served: Served, host: str, status: int) -> None:
    assert served.client.get("/api/run.json", headers={"Host": host}).status_code == status


def test_static_files_are_kept_by_browsers_and_named_by_their_content(served: Served) -> None:
    index = served.client.get("/")
    assert index.headers["cache-control"] == "no-cache"
    assert served.client.get("/", headers={"If-None-Match": index.headers["etag"]}).status_code == 304
    names = [word.partition('"')[0] for word in index.text.split('="/static/')[1:]]
    assert len(names) >= 6
    for name in names:
        answer = served.client.get(f"/static/{name}")
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    assert "<script>" not in index.text  # the policy forbids inline scripts
    assert "style=" not in index.text
    assert "{static}" not in index.text
    assert "http" not in index.text.replace("http-equiv", "")  # nothing from other hosts
    version = names[0].partition("/")[0]
    others = ["../app.py", "%2e%2e/app.py", "index.html", "page.js/", "../0000000000000000/page.js"]
    for path in others:
        assert served.client.get(f"/static/{version}/{path}").status_code == 404


def test_masks_are_filled(served: Served) -> None:
    assert served.get("/api/fill.json?text=x+[MASK]") == {
        "text": "x paris",
        "guesses": [[{"token": "paris", "share": 0.5}]],
    }
    for text in ("", "no mask", "[MASK]" * 100):
        answer = served.client.get("/api/fill.json", params={"text": text})
        assert answer.status_code == 400
        assert answer.json()["error"]


def test_the_api_gives_the_latest_events(served: Served) -> None:
    for number in range(5):
        served.run.tell("joined", f"peer {number}", ago_s=float(5 - number))
    events = msgspec.convert(served.get("/api/events.json?limit=2")["events"], list[RunEvent])
    assert [event.text for event in events] == ["peer 4", "peer 3"]


def test_failure_of_the_source_is_logged_once(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(limit: int) -> list[RunEvent]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(served.run, "events", broken)
    answers = [httpx.get(f"{served.server.url}/api/events.json", trust_env=False) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [500] * 3
    assert all(answer.headers["x-content-type-options"] == "nosniff" for answer in answers)
    told = [record.getMessage() for record in caplog.records if record.name.startswith("manyhands")]
    assert [line.partition(":")[0] for line in told] == ["The page cannot answer /api/events.json"]


def test_server_that_listens_to_everybody_says_so_and_takes_any_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    server = PageServer(SyntheticRun(1, time.time()), bind("0.0.0.0:0"))
    server.start()
    with httpx.Client(trust_env=False) as client:
        answer = client.get(f"{server.url}/api/run.json", headers={"Host": "monitor.example"})
        assert answer.status_code == 200
        assert client.get(f"{server.url}/api/fill.json?text=x").status_code == 404
    server.close()
    assert f"The page of the run: {server.url}" in caplog.text
    assert "Everybody who can reach this machine can read the page" in caplog.text


def test_the_page_says_how_to_join_unless_it_is_by_ticket(served: Served) -> None:
    assert "<code>manyhands join &lt;host&gt;:31337</code>" in served.client.get("/").text
    assert b'<p id="join" hidden>' in page_files(has_model=False).index
