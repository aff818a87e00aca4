"""The data is a fact of the run: a joiner has it, fetches it, or is told. It never trains on other text in silence."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.data.dataset import ABOUT
from manyhands.recipes.albert.data.run_data import PYTHON_DOCS, RunData, data_for_run, data_of, is_public
from tests.integration.data_hosts import Host, hosting, make_data
from tests.unit.recipes.texts import BOOK

SAMPLES = Path("data/albert_tokenized_wikitext")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the person who began the run."""
    return make_data(tmp_path_factory.mktemp("made")).parent


@pytest.fixture
def host(made: Path) -> Iterator[Host]:
    with hosting(made / "data" / "shards") as host:
        yield host


@pytest.fixture(autouse=True)
def joiner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """The empty folder of a joiner."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "manyhands")
    return tmp_path


def of_folder(made: Path) -> RunData:
    return data_of({"dataset_path": made / SAMPLES})


def chosen(wanted: RunData, *, any_text: bool = False, **given: Any) -> dict[str, Any]:
    return data_for_run("run", wanted, given, any_text=any_text)


def test_text_is_known_by_what_it_says_and_not_by_its_name(joiner: Path) -> None:
    data = []
    for name, text in (("a", BOOK.text), ("b", BOOK.text.replace("\n", "\r\n")), ("c", f"{BOOK.text} One more.")):
        (joiner / name).write_bytes(text.encode())
        data.append(data_of({"text": (Path(name),)}))
    assert data[0] == data[1] != data[2]
    assert data_of({}) == RunData(PYTHON_DOCS)


def test_a_folder_an_archive_and_shards_of_the_same_samples_are_the_same_data(made: Path, host: Host) -> None:
    folder, shards = of_folder(made), data_of({"dataset_url": (host.url,)})
    assert folder.digest == shards.digest
    assert (folder.urls, shards.urls) == ((), (host.url,))
    url = (made / "data.tar.gz").as_uri()
    archive = data_of({"dataset_url": (url,), "dataset_path": made / SAMPLES})
    assert archive == folder, "a file of one machine is no place where others get it"


def test_data_without_a_description_is_known_by_its_samples(made: Path, joiner: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(made / "data", joiner / name)
        (joiner / name / ABOUT).unlink()
    one, two = (data_of({"dataset_path": joiner / name / SAMPLES.name}) for name in ("one", "two"))
    assert one == two != of_folder(made)
    shutil.rmtree(joiner / "two" / SAMPLES.name / "validation")
    shutil.copytree(joiner / "one" / SAMPLES.name / "train", joiner / "two" / SAMPLES.name / "validation")
    assert data_of({"dataset_path": joiner / "two" / SAMPLES.name}) != one


def test_the_data_in_this_folder_is_used_if_it_is_that_of_the_run(made: Path, joiner: Path) -> None:
    shutil.copytree(made / "data", joiner / "data")
    assert chosen(of_folder(made))["dataset_path"] == SAMPLES
    assert chosen(RunData()) == {}, "the run trains on the documentation that comes with Python"
    with pytest.raises(ConfigError, match="is not on this machine"):
        chosen(RunData("another digest"))


def test_data_that_is_not_here_is_fetched_from_the_address_in_the_run(
    made: Path, host: Host, joiner: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = data_of({"dataset_url": (host.url,)})
    assert chosen(wanted, cache_dir=joiner / "cache")["dataset_url"] == (host.url,)
    assert caplog.messages[0].startswith("Run 'run' trains on data with digest ")
    assert caplog.messages[0].endswith(f"which is not on this machine: fetching it from {host.url}")
    with hosting(made) as archives:
        url = archives.url.replace("index.json", "data.tar.gz")
        found = chosen(RunData(wanted.digest, (url,)), cache_dir=joiner / "cache")
        assert data_of(found) == RunData(wanted.digest, (url,))
        assert (joiner / "cache") in found["dataset_path"].parents


def test_an_address_that_has_other_data_now_is_refused(host: Host, joiner: Path) -> None:
    with pytest.raises(ConfigError, match="has other data now"):
        chosen(RunData("another digest", (host.url,)), cache_dir=joiner / "cache")


@pytest.mark.parametrize("url", ["file:///etc/index.json", "github://a:b@c/index.json", "http://a:b@host/x", ""])
def test_without_an_address_that_can_be_opened_the_joiner_is_told_what_to_write(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        chosen(RunData("0123456789abcdef", (url,) if url else ()))
    assert str(raised.value) == (
        "run 'run' trains on data with digest 0123456789ab, which is not on this machine, and names no address for it: "
        "ask the person who began the run for it, and name it with --text FILE, --dataset-path FOLDER or --dataset-url "
        "ADDRESS; or train on other text (the documentation that comes with Python) with --any-text"
    )


@pytest.mark.parametrize(("given", "any_text"), [({"text": (Path("mine.txt"),)}, False), ({}, True)])
def test_other_text_is_used_on_request_and_with_a_warning(
    given: dict[str, Any], any_text: bool, host: Host, joiner: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (joiner / "mine.txt").write_text(BOOK.text)
    assert chosen(RunData("another digest", (host.url,)), any_text=any_text, **given) == given
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "digest another dige. As asked, this peer trains on other data: " in record.message
    assert not host.requests


def test_data_addresses_of_strangers_are_made_printable() -> None:
    with pytest.raises(ConfigError) as raised:
        chosen(RunData("\x1b[2J", ("http://\x1b[2J@host",)))
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://example.org/data/index.json", True),
        ("s3://bucket/index.json", True),
        ("ftp://example.org/data.tar", True),
        ("https://user:password@example.org/index.json", False),
        ("https://example.org/data.tar?signature=secret", False),
        ("file:///home/me/index.json", False),
        ("http://example.org/my data/index.json", False),
        ("ssh://example.org/index.json", False),
    ],
)
def test_an_address_is_published_only_if_it_is_for_everybody(url: str, expected: bool) -> None:
    assert is_public(url) is expected
