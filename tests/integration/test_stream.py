"""Data that is fetched from real HTTP servers, which throttle, cut, know no ranges, or have another file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from manyhands.base.digests import sha256_of
from manyhands.base.errors import ConfigError
from manyhands.cli.main import run
from manyhands.recipes.albert.data import fetching
from manyhands.recipes.albert.data.fetching import Fetcher, Mirrors, files_of, index_url, read_index
from manyhands.recipes.albert.data.serving import application
from manyhands.recipes.albert.data.shard_stream import HostedData, ShardStream
from manyhands.recipes.albert.data.shards import Shard
from manyhands.transport import http_connections
from manyhands.transport.http_connections import bounded_server
from tests.integration.data_hosts import NUM_SHARDS, Host, hosting, make_data
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("made")) / "shards"


@pytest.fixture
def host(shards: Path) -> Iterator[Host]:
    with hosting(shards) as host:
        yield host


@contextmanager
def streaming(*hosts: Host, folder: Path, order: str = "0 peer", max_bytes: int = 10**9, position: Path | None = None):
    stream = ShardStream(HostedData([host.url for host in hosts], folder, max_bytes), order, position)
    try:
        yield stream
    finally:
        stream.close()


def wrong(name: str, data: bytes) -> bytes:
    return bytes(len(data)) if name.startswith("train") else data


def test_training_begins_with_the_first_shard_and_each_peer_has_an_order_of_its_own(host: Host, tmp_path: Path) -> None:
    orders = []
    for peer in ("0 a", "0 b", "0 c", "1 a"):
        host.requests.clear()
        with streaming(host, folder=tmp_path / peer.replace(" ", ""), order=peer) as stream:
            wait_until(lambda: len(host.names()) == 2)  # the next one is fetched ahead, and no more
            assert len(stream) > len(stream.samples) > 0
            for _ in range(NUM_SHARDS - 1):
                stream.advance()
            assert len(set(host.names())) == NUM_SHARDS == len(host.names())
            orders.append(tuple(host.names()))
    assert len(set(orders)) > 1


def test_a_shard_whose_download_breaks_off_is_resumed_by_ranges(host: Host, shards: Path, tmp_path: Path) -> None:
    host.cut_after = max(path.stat().st_size for path in shards.glob("train*")) // 3
    shard = read_index((shards / "index.json").read_bytes()).train[0]
    Mirrors([host.url], Fetcher()).fetch(shard, tmp_path / "shard")
    assert sha256_of(tmp_path / "shard") == shard.sha256
    ranges = [given for _, given in host.requests]
    assert ranges[0] is None
    assert len(ranges) > 2
    assert all(ranges[1:])


def test_a_server_without_ranges_sends_all_of_it_again(host: Host, shards: Path, tmp_path: Path) -> None:
    host.has_ranges = False
    shard = read_index((shards / "index.json").read_bytes()).train[0]
    (tmp_path / "shard.part").write_bytes((shards / shard.name).read_bytes()[:1000])
    Mirrors([host.url], Fetcher()).fetch(shard, tmp_path / "shard")
    assert sha256_of(tmp_path / "shard") == shard.sha256


def test_a_corrupt_shard_comes_from_the_next_mirror(host: Host, shards: Path, tmp_path: Path) -> None:
    with hosting(shards) as bad:
        bad.changed = wrong
        with streaming(bad, host, folder=tmp_path) as stream:
            assert len(stream.samples)
        assert bad.names()[0] == host.names()[0]


def test_a_shard_that_nobody_has_in_order_is_skipped_with_one_warning(
    host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host.changed = lambda name, data: wrong(name, data) if "00001-of" in name else data
    with streaming(host, folder=tmp_path) as stream:
        for _ in range(3 * NUM_SHARDS):
            stream.advance()
    assert [record.message.split(":")[0] for record in caplog.records] == ["Skipping shard train-00001-of-00004.arrow"]


def test_a_stream_without_any_good_shard_is_refused(host: Host, tmp_path: Path) -> None:
    host.changed = wrong
    with (
        pytest.raises(ConfigError, match="none of the 4 shards matches the index"),
        streaming(host, folder=tmp_path),
    ):
        pass


def test_training_goes_on_from_the_cache_while_the_server_is_down(
    host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with streaming(host, folder=tmp_path) as stream:
        wait_until(lambda: len(list(tmp_path.glob("1/*.arrow"))) >= 3)  # validation, and two for training
        host.is_down = True
        (tmp_path / "1" / f"{'0' * 64}.arrow").write_bytes(b"of other data")  # and unused for longest
        os.utime(tmp_path / "1" / f"{'0' * 64}.arrow", (1, 1))
        held_out = stream.data.cache.path_of(stream.index.validation[0])
        trained_on = set()
        for _ in range(10):
            stream.advance()
            trained_on.add(stream.path)
        names = {stream.data.cache.path_of(shard) for shard in stream.index.train}
        assert held_out.exists()
        assert len(trained_on) >= 2
        assert trained_on <= names, "neither what is held out, nor what is of other data"
        assert len([record for record in caplog.records if "has not arrived" in record.message]) == 1
        host.is_down = False

        def all_have_come() -> bool:
            stream.advance()
            return len(list(tmp_path.glob("1/*.arrow"))) == NUM_SHARDS + 2

        wait_until(all_have_come)


def test_the_cache_keeps_to_its_limit(host: Host, tmp_path: Path) -> None:
    with streaming(host, folder=tmp_path, max_bytes=1) as stream:
        for _ in range(2 * NUM_SHARDS):
            stream.advance()
            assert len(list(tmp_path.glob("1/*.arrow"))) <= 3  # the current one, the next one, and one that comes


def test_a_peer_that_restarts_goes_on_with_a_shard_that_it_has_not_begun(host: Host, tmp_path: Path) -> None:
    position = tmp_path / "stream.json"
    with streaming(host, folder=tmp_path / "a", position=position):
        first = host.names()[0]
    host.requests.clear()
    with streaming(host, folder=tmp_path / "b", position=position):
        assert host.names()[0] != first


def test_a_full_disk_makes_the_cache_smaller(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fetch, room = Mirrors.fetch, NUM_SHARDS

    def fetch_if_there_is_room(self: Mirrors, shard: Shard, path: Path) -> None:
        if len(list(path.parent.glob("*.arrow"))) >= room:
            raise OSError(errno.ENOSPC, "No space left on device")
        fetch(self, shard, path)

    monkeypatch.setattr(Mirrors, "fetch", fetch_if_there_is_room)
    with streaming(host, folder=tmp_path) as stream:
        for _ in range(2 * NUM_SHARDS):
            stream.advance()
    assert "The disk is full: the cache" in caplog.text


def test_a_mirror_that_is_too_slow_is_left(
    host: Host, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "SILENCE_S", 0.3)
    with hosting(shards) as slow:
        slow.pause_s = 1.0
        shard = read_index((shards / "index.json").read_bytes()).train[0]
        Mirrors([slow.url, host.url], Fetcher()).fetch(shard, tmp_path / "shard")
        assert slow.names() == host.names() == [shard.name]


@contextmanager
def serving(shards: Path) -> Iterator[tuple[str, int]]:
    """The server of ``manyhands data serve``; its host and port."""
    server = bounded_server(application(shards))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            yield sock.getsockname()
        finally:
            server.should_exit = True
            thread.join(5.0)
            assert not thread.is_alive()


def test_a_server_has_the_files_of_the_index_and_nothing_else(shards: Path) -> None:
    (shards / ".secret").write_text("secret")
    (shards / "other").write_text("secret")
    with serving(shards) as address, closing(HTTPConnection(*address, timeout=5.0)) as client:

        def get(path: str, **headers: str) -> tuple[int, bytes]:
            client.request("GET", path, headers=headers)
            answer = client.getresponse()
            return answer.status, answer.read()

        tokenizer = (shards / "tokenizer.json").read_bytes()
        assert get("/tokenizer.json") == (200, tokenizer)
        assert get("/tokenizer.json", Range="bytes=5-9") == (206, tokenizer[5:10])
        for path in ("/", "/.secret", "/other", "/../manyhands.json", "/%2e%2e/manyhands.json", "/..%2fmanyhands.json"):
            assert get(path)[0] == 404, path


def test_a_server_logs_nothing_that_a_stranger_has_written(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with serving(shards) as address, closing(HTTPConnection(*address, timeout=5.0)) as client:
        for headers in ({"Range": "bytes=0-\x1b[2J"}, {"X-Forwarded-For": "8.8.8.8"}, {"Range": "bytes=5-"}):
            client.request("GET", "/index.json", headers=headers)
            client.getresponse().read()
    assert [record.getMessage() for record in caplog.records] == [
        "127.0.0.1 fetches index.json", "127.0.0.1 fetches index.json", "127.0.0.1 fetches index.json (bytes=5-)",
    ]  # fmt: skip


def test_a_server_says_that_a_file_is_gone(shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(shards, tmp_path / "shards")
    with serving(tmp_path / "shards") as address, closing(HTTPConnection(*address, timeout=5.0)) as client:
        (tmp_path / "shards" / "tokenizer.json").unlink()
        client.request("GET", "/tokenizer.json")
        assert client.getresponse().status == 404
    assert "127.0.0.1 asks for tokenizer.json, which is gone or cannot be read" in caplog.text


def test_a_server_closes_connections_that_ask_for_nothing(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections, "REQUEST_TIMEOUT_S", 0.1)
    with (
        serving(shards) as address,
        socket.create_connection(address, timeout=5.0) as silent,
        contextlib.suppress(ConnectionResetError),
    ):
        assert silent.recv(1) == b""


def test_a_server_that_cannot_begin_says_why(
    host: Host, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, listen in ((shards, f"127.0.0.1:{host.server.server_port}"), (shards, "nonsense"), (tmp_path, "8000")):
        assert run(["data", "serve", str(folder), "--listen", listen]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_trainer_whose_data_cannot_be_had_says_so_before_it_begins(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    host.is_down = True
    assert run(["train", "--dataset-url", host.url, "--no-checkpoints"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{host.url}: HTTP 503" in line
    assert run(["train", "--dataset-url", host.url, "--text", "book.txt"]) == 2


def test_each_address_that_does_not_answer_is_named_with_its_reason(tmp_path: Path) -> None:
    urls = ["http://127.0.0.1:9/index.json", (tmp_path / "none").as_uri()]
    before = time.monotonic()
    refused = r"^the data cannot be fetched: http://127.0.0.1:9/index.json: Connection refused; .*none/index.json: "
    with pytest.raises(ConfigError, match=refused) as raised:
        HostedData(urls, tmp_path / "cache", 10**9)
    assert time.monotonic() - before < 30
    assert "\n" not in str(raised.value)


def test_an_address_that_cannot_be_read_is_refused_with_one_that_can(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--dataset-url", "http://me:secret@[::1/index.json?signature=hush", "--no-checkpoints"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'[::1/index.json'" in line
    assert "secret" not in line
    assert "hush" not in line
    assert "cannot be read (Invalid IPv6 URL); give one such as http://203.0.113.7:8000/index.json" in line


def test_passwords_and_signatures_of_addresses_are_not_shown(tmp_path: Path) -> None:
    urls = ["http://me:secret@127.0.0.1:9/index.json", "http://127.0.0.1:9/index.json?signature=secret"]
    with pytest.raises(ConfigError, match=re.escape("http://***@127.0.0.1:9/index.json: ")) as raised:
        HostedData(urls, tmp_path / "cache", 10**9)
    assert "secret" not in str(raised.value)


def test_files_are_fetched_from_other_addresses_as_well(shards: Path, tmp_path: Path) -> None:
    stream = ShardStream(HostedData([shards.as_uri()], tmp_path, 10**9), "order")
    try:
        assert len(stream.samples)
    finally:
        stream.close()


def test_verify_says_what_is_wrong(
    host: Host, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "verify", str(shards)]) == 0
    assert run(["data", "verify", host.url]) == 0
    capsys.readouterr()
    host.changed = lambda name, data: wrong(name, data) if "00001-of" in name else data
    assert run(["data", "verify", host.url]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "train-00001-of-00004.arrow" in line
    assert "the file differs from its description" in line
    assert run(["data", "verify", str(tmp_path)]) == 2


def test_verify_of_a_whole_folder_finds_a_changed_byte_of_the_samples_and_of_the_shards(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, shard = tmp_path / "data", "train-00001-of-00004.arrow"
    shutil.copytree(shards.parent, folder)
    assert run(["data", "verify", str(folder)]) == 0
    capsys.readouterr()
    for path in (next((folder / "albert_tokenized_wikitext" / "train").glob("*.arrow")), folder / "shards" / shard):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert run(["data", "verify", str(folder)]) == 1
    of_samples, of_shards = capsys.readouterr().out.splitlines()
    assert "data-00000-of-00001.arrow has another SHA-256 than manyhands.json says" in of_samples
    assert f"{shard} has another SHA-256 than index.json says" in of_shards
    about = folder / "manyhands.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"sha256": {}}))
    assert run(["data", "verify", str(folder)]) == 1
    assert "manyhands.json has no SHA-256 of the samples" in capsys.readouterr().out


def test_an_index_cannot_name_files_elsewhere(shards: Path) -> None:
    good = (shards / "index.json").read_bytes()
    assert len(files_of(read_index(good))) == NUM_SHARDS + 2
    for name in ("../train", ".hidden", "/etc/passwd"):
        with pytest.raises(ConfigError, match="names an invalid file"):
            read_index(good.replace(b'"tokenizer.json"', f'"{name}"'.encode()))


def test_a_path_of_shards_is_answered_with_their_address(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my data" / "shards"
    shutil.copytree(shards, folder)
    monkeypatch.chdir(tmp_path)
    for option, given in (
        ("--dataset-path", "my data/shards"), ("--dataset-url", "my data/shards"),
        ("--dataset-url", "my data/shards/index.json"), ("--dataset-url", str(folder)),
    ):  # fmt: skip
        assert run(["train", "--run-id", "x", option, given]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        url = shlex.split(line)[-1]
        assert url == f"file://{folder}/index.json"
        index = HostedData([url], tmp_path / "cache", 10**9).index
        assert index == read_index((shards / "index.json").read_bytes())


def test_the_address_of_a_folder_is_that_of_its_index() -> None:
    assert index_url("http://host:8000") == "http://host:8000/index.json"
    assert index_url("s3://bucket/folder/") == "s3://bucket/folder/index.json"
    with pytest.raises(ConfigError, match="is not an address"):
        index_url("folder")
    with pytest.raises(ConfigError, match=r"unpack it .* curl -L http://host/data.tar.gz \| tar xzf -"):
        index_url("http://host/data.tar.gz")
