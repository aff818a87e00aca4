"""Checkpoints get to the Hub, at its socket; what goes wrong there is said and tried again."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.base.errors import ConfigError, MissingExtra
from manyhands.monitor.hub import HubUploads, checked_repo
from tests.unit.monitor.fake_hub import FakeHub, fake_hub
from tests.waiting import wait_until


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        yield hub


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "optimizer.safetensors"):
        (folder / name).write_bytes(name.encode() * 10)
    return folder


def test_the_folder_is_committed_once_and_after_a_failure_at_the_next_interval(
    hub: FakeHub, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    hub.refusals = 1
    uploads = HubUploads("model", interval_s=0.5)
    uploads.offer(checkpoint, "Step #5, loss 4.25000")
    wait_until(lambda: "Uploaded checkpoint-5 to" in caplog.text)
    uploads.close()
    assert hub.commits == [("Step #5, loss 4.25000", {file.name: file.read_bytes() for file in checkpoint.iterdir()})]
    assert hub.tokens == {"Bearer hf_of_a_test"}
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("checkpoint-5 was not uploaded to model (")
    assert "403" in warning
    assert warning.endswith("; trying again in 0.5 s")


def test_an_upload_that_hangs_does_not_keep_the_monitor_from_ending(
    hub: FakeHub, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.goes_on.clear()
    uploads = HubUploads("model", interval_s=60.0)
    uploads.offer(checkpoint, "Step #5")
    wait_until(lambda: hub.num_asked)
    began = time.monotonic()
    uploads.close()
    assert time.monotonic() - began < 15.0
    assert not caplog.records


def test_an_upload_ends_with_its_parent(hub: FakeHub, checkpoint: Path) -> None:
    hub.goes_on.clear()
    command = [sys.executable, "-m", "manyhands.monitor.hub", "model", str(checkpoint), "Step #5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as upload:
        wait_until(lambda: hub.num_asked)
        assert upload.stdin is not None
        upload.stdin.close()
        assert upload.wait(20) == 1


@pytest.mark.parametrize(
    ("given", "repo"),
    [
        ("somebody/my-albert", "somebody/my-albert"),
        ("my-albert", "my-albert"),
        ("https://huggingface.co/somebody/my-albert", "somebody/my-albert"),
        ("https://huggingface.co/somebody/my-albert.git/", "somebody/my-albert"),
    ],
)
def test_a_repository_is_named_or_its_page(given: str, repo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    assert checked_repo(given) == repo


def test_a_hub_repository_that_cannot_be_used_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="run: hf auth login"):
        checked_repo("somebody/my-albert")
    with pytest.raises(ConfigError, match="for example OWNER/my-albert"):
        checked_repo("https://example.com/a/b")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"\[albert\]"):
        checked_repo("somebody/my-albert")
