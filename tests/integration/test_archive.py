"""An archive of prepared data is fetched from real servers, once."""

from __future__ import annotations

import io
import shutil
import tarfile
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.data import fetching
from manyhands.recipes.albert.data.archive import unpacked, with_unpacked
from manyhands.recipes.albert.data.dataset import found_here, open_prepared
from tests.integration.data_hosts import Host, hosting, make_data

ARCHIVE = "data.tar.gz"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("made")).parent


@pytest.fixture
def host(made: Path, tmp_path: Path) -> Iterator[Host]:
    folder = tmp_path / "hosted"
    folder.mkdir()
    for name in (ARCHIVE, f"{ARCHIVE}.sha256"):
        shutil.copy(made / name, folder)
    with hosting(folder) as host:
        host.url = host.url.replace("index.json", ARCHIVE)
        yield host


def test_an_archive_is_fetched_once_and_used_like_a_folder(host: Host, tmp_path: Path) -> None:
    given = {"dataset_url": (host.url,), "cache_dir": tmp_path / "cache", "seed": 7}
    found = found_here(with_unpacked(given))
    assert {name: found[name] for name in given} == given
    prepared = open_prepared(found["dataset_path"], found["tokenizer"])
    assert prepared.about is not None
    assert len(prepared.training)
    assert [name for name, _ in host.requests] == [f"{ARCHIVE}.sha256", ARCHIVE]
    assert not list((tmp_path / "cache").rglob("archive*.part"))
    host.is_down = True
    assert found_here(with_unpacked(given)) == found
    assert len(host.requests) == 2


def test_a_download_that_broke_off_is_resumed_by_the_next_start(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (host.folder / ARCHIVE).stat().st_size
    host.cut_after = size // 4
    monkeypatch.setattr(fetching, "MAX_RESUMES", 2)
    with pytest.raises(ConfigError, match=r"broke off 2 times.* are kept: start again"):
        unpacked([host.url], tmp_path)
    monkeypatch.undo()
    host.requests.clear()
    assert unpacked([host.url], tmp_path).is_dir()
    ranges = [given for name, given in host.requests if name == ARCHIVE]
    assert ranges[0] == f"bytes={size // 4 * 2}-"
    assert len(ranges) >= 2


def test_an_archive_of_another_digest_comes_from_the_next_mirror_or_is_refused(host: Host, tmp_path: Path) -> None:
    with hosting(host.folder) as bad:
        bad.url = bad.url.replace("index.json", ARCHIVE)
        bad.changed = lambda name, data: bytes(len(data)) if name == ARCHIVE else data
        assert unpacked([bad.url, host.url], tmp_path / "a").is_dir()
        with pytest.raises(ConfigError, match="the file differs from its description"):
            unpacked([bad.url], tmp_path / "b")
        bad.changed = lambda name, data: b"<html>Log in first</html>".ljust(len(data))  # without a SHA-256
        with pytest.raises(ConfigError, match=r"cannot be unpacked \(it is not a tar archive, perhaps a page"):
            unpacked([bad.url], tmp_path / "c")
        bad.changed = lambda name, data: data  # it is fetched again
        assert unpacked([bad.url], tmp_path / "c").is_dir()


@pytest.mark.parametrize("name", ["../outside", "/outside", "link"])
def test_archive_members_outside_the_folder_are_refused(host: Host, tmp_path: Path, name: str) -> None:
    (host.folder / f"{ARCHIVE}.sha256").unlink()
    with tarfile.open(host.folder / ARCHIVE, "w:gz") as archive:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc"
            archive.addfile(member)
        else:
            member.size = 4
            archive.addfile(member, io.BytesIO(b"evil"))
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        unpacked([host.url], tmp_path / "cache")
    assert not list(tmp_path.glob("outside"))
    assert not list((tmp_path / "cache" / "archives").glob("outside"))
    assert not Path("/outside").exists()


def test_a_disk_that_is_too_small_is_refused_before_the_download(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (host.folder / ARCHIVE).stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, size))
    with pytest.raises(ConfigError, match=r"has [\d.]+ kB free, and [\d.]+ kB are needed .*--cache-dir"):
        unpacked([host.url], tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("archive*") if path.is_file()) == 0


def test_two_fetchers_of_one_archive_download_it_once(host: Host, tmp_path: Path) -> None:
    host.pause_s = 0.3
    found = []
    threads = [threading.Thread(target=lambda: found.append(unpacked([host.url], tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert len(host.requests) == 2


def test_a_server_that_is_down_is_said_soon_with_its_reason(tmp_path: Path) -> None:
    urls = ["http://127.0.0.1:9/data.tar.gz", "ftp://127.0.0.1:9/data.tar.gz"]
    before = time.monotonic()
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:9/data.tar.gz: .*ftp://127.0.0.1:9/data.tar.gz: "):
        unpacked(urls, tmp_path)
    assert time.monotonic() - before < 30
    with pytest.raises(ConfigError, match="which is not one"):
        with_unpacked({"dataset_url": ("http://host/data.tar", "http://host/index.json")})
