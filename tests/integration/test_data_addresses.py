"""Data from a real FTP server, and from a server that speaks S3's protocol."""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import fsspec
import pytest
from moto.server import ThreadedMotoServer

from manyhands.base.digests import sha256_of
from manyhands.base.errors import ConfigError
from manyhands.cli.main import run
from manyhands.recipes.albert.data import archive, fetching, shard_stream
from manyhands.recipes.albert.data.archive import unpacked
from manyhands.recipes.albert.data.fetching import ExpectedFile, Fetcher, Mirrors, read_index
from manyhands.recipes.albert.data.shard_stream import HostedData, ShardStream
from tests.integration.data_hosts import NUM_SHARDS, hosting, make_data

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it uses asyncore where Python still has it
    from pyftpdlib.authorizers import DummyAuthorizer
    from pyftpdlib.handlers import DTPHandler, FTPHandler
    from pyftpdlib.servers import FTPServer

BUCKET = "data"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("made")).parent


@contextmanager
def ftp_server(folder: Path, transfer: type[DTPHandler] = DTPHandler) -> Iterator[str]:
    authorizer = DummyAuthorizer()
    authorizer.add_anonymous(str(folder))
    handler = type("Handler", (FTPHandler,), {"authorizer": authorizer, "dtp_handler": transfer})
    server = FTPServer(("127.0.0.1", 0), handler)
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            server.serve_forever(timeout=0.02, blocking=False, handle_exit=False)
        server.close_all()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"ftp://127.0.0.1:{server.address[1]}"
    finally:
        is_over.set()
        thread.join()


@pytest.fixture(scope="module")
def s3_server(made: Path) -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    client = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    client.create_bucket(Bucket=BUCKET)
    for path in [made / "data.tar.gz", *(made / "data" / "shards").iterdir()]:
        name = path.name if path.parent == made else f"shards/{path.name}"
        client.upload_file(str(path), BUCKET, name, ExtraArgs={"ACL": "public-read"})
    client.close()
    yield url
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Public data, and a user without credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    return f"s3://{BUCKET}"


def check_streamed(url: str, folder: Path) -> None:
    shards = ShardStream(HostedData([url], folder, 10**9), "order")
    try:
        for _ in range(NUM_SHARDS - 1):
            assert len(shards.samples)
            shards.advance()
        assert len(list(folder.glob("1/*.arrow"))) == NUM_SHARDS + 1
    finally:
        shards.close()


def check_resumed(url: str, made: Path, folder: Path) -> None:
    """Most of a file is here already."""
    shard = read_index((made / "data" / "shards" / "index.json").read_bytes()).train[0]
    whole = (made / "data" / "shards" / shard.name).read_bytes()
    (folder / "shard.part").write_bytes(whole[: len(whole) * 3 // 4])
    Mirrors([url], Fetcher()).fetch(shard, folder / "shard")
    assert sha256_of(folder / "shard") == shard.sha256


def test_shards_come_by_ftp(made: Path, tmp_path: Path) -> None:
    with ftp_server(made) as url:
        check_streamed(f"{url}/data/shards/index.json", tmp_path)


def test_an_archive_comes_by_ftp(made: Path, tmp_path: Path) -> None:
    with ftp_server(made) as url:
        assert unpacked([f"{url}/data.tar.gz"], tmp_path).is_dir()


def test_ftp_goes_on_where_it_was_cut(made: Path, tmp_path: Path) -> None:
    asked = []

    class Transfer(DTPHandler):
        def close(self) -> None:
            asked.append(self.get_transmitted_bytes())
            super().close()

    with ftp_server(made, Transfer) as url:
        check_resumed(f"{url}/data/shards", made, tmp_path)
    size = (made / "data" / "shards" / read_index((made / "data/shards/index.json").read_bytes()).train[0].name).stat()
    assert 0 < max(asked) < size.st_size


def test_a_file_of_many_requests_comes_whole_by_ftp(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(os.urandom(5_500_000))
    with ftp_server(tmp_path) as url:
        Fetcher().fetch([f"{url}/large"], ExpectedFile(5_500_000), tmp_path / "here")
    assert sha256_of(tmp_path / "here") == sha256_of(tmp_path / "large")


def test_a_missing_file_and_a_dead_server_are_told_by_ftp(made: Path, tmp_path: Path) -> None:
    with ftp_server(made) as url, pytest.raises(ConfigError, match=rf"{url}/none/index.json: .*"):
        HostedData([f"{url}/none"], tmp_path, 10**9)
    assert run(["train", "--dataset-url", url, "--no-checkpoints"]) == 2


@contextmanager
def silent() -> Iterator[str]:
    """Accepts connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("scheme", ["http", "ftp", "s3"])
def test_servers_that_are_silent_at_the_start_are_told_in_time(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_stream, "Patience", lambda: fetching.Patience(2.0))
    with silent() as one, silent() as other:
        if scheme == "s3":
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{one}")
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
            one, other = "bucket", "another"
            fsspec.filesystem("s3")  # its import takes a second on a busy machine, and is no silence
        began = time.monotonic()
        pattern = rf"{scheme}://{one}/index.json: no answer .*{scheme}://{other}/index.json: no answer"
        with pytest.raises(ConfigError, match=pattern):
            HostedData([f"{scheme}://{one}", f"{scheme}://{other}"], tmp_path, 10**9)
        assert time.monotonic() - began < fetching.START_PATIENCE_S


def test_silent_hosts_of_an_archive_are_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "START_PATIENCE_S", 1.2)
    with silent() as one, silent() as other:
        urls = [f"ftp://{one}/data.tar.gz", f"http://{other}/data.tar.gz"]
        began = time.monotonic()
        with pytest.raises(ConfigError, match=rf"{urls[0]}: no answer .*{urls[1]}: no answer"):
            unpacked(urls, tmp_path)
        assert time.monotonic() - began < fetching.START_PATIENCE_S


def test_mirrors_are_not_asked_once_the_time_limit_is_used_up(tmp_path: Path) -> None:
    with silent() as address:
        mirrors = Mirrors([f"http://{address}"], Fetcher(patience=fetching.Patience(0.0)))
        with pytest.raises(ConfigError, match="not asked"):
            mirrors.index(tmp_path / "index.json")


def test_a_mirror_that_is_silent_is_asked_once(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_stream, "Patience", lambda: fetching.Patience(2.0))
    with hosting(made / "data" / "shards") as dead, hosting(made / "data" / "shards") as host:
        dead.hangs_at = ("index", "tokenizer", "validation", "train")
        ShardStream(HostedData([dead.url, host.url], tmp_path, 10**9), "order").close()
    assert [name for name, _ in dead.requests] == ["index.json"]


@pytest.mark.parametrize("silent_name", ["tokenizer", "validation", "train"])
def test_a_server_that_goes_down_during_the_start_is_told_in_time(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_name: str
) -> None:
    monkeypatch.setattr(shard_stream, "Patience", lambda: fetching.Patience(2.0))
    with hosting(made / "data" / "shards") as host, hosting(made / "data" / "shards") as mirror:
        for one in (host, mirror):
            one.hangs_at = (silent_name,)
        began = time.monotonic()
        with pytest.raises(ConfigError, match=rf"{silent_name}.*: no answer .*{silent_name}.*: no answer"):
            ShardStream(HostedData([host.url, mirror.url], tmp_path, 10**9), "order")
        assert time.monotonic() - began < fetching.START_PATIENCE_S


def test_shards_come_from_s3_without_credentials(s3: str, tmp_path: Path) -> None:
    check_streamed(f"{s3}/shards", tmp_path)


def test_an_archive_comes_from_s3(s3: str, tmp_path: Path) -> None:
    assert unpacked([f"{s3}/data.tar.gz"], tmp_path).is_dir()


def test_s3_goes_on_where_it_was_cut(s3: str, made: Path, tmp_path: Path) -> None:
    check_resumed(f"{s3}/shards", made, tmp_path)


def test_a_missing_bucket_and_a_missing_package_are_told(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"s3://none/index.json: "):
        HostedData(["s3://none"], tmp_path / "a", 10**9)
    with pytest.raises(ConfigError, match=r"try: pip install gcsfs"):
        HostedData(["gs://none"], tmp_path / "b", 10**9)
