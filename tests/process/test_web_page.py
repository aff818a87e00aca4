"""The page of a real run: a monitor shows two trainers in a real browser, and one of them dies."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser import chromium, found_chromium
from tests.process.commands import LOOPBACK, Command, address_of, running
from tests.process.test_monitor import text, trainer

pytestmark = pytest.mark.process

INTERRUPTED = 130
URL = re.compile(r"The page of the run: (http://127\.0\.0\.1:\d+)")

__all__ = ["text"]


def url_of(command: Command) -> str:
    found = URL.search(command.wait_for("The page of the run: "))
    assert found is not None
    return found[1]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(found_chromium() is None, reason="there is no Chromium here")
def test_monitor_shows_a_run_in_a_browser(text: Path) -> None:
    with running("monitor", "--run-id", "seen", "--listen", LOOPBACK, "--web", "127.0.0.1:0") as monitor:
        address = address_of(monitor)
        url = url_of(monitor)
        with chromium() as browser:
            page = browser.new_page()
            page.goto(url)
            expect(page.locator("#connection")).to_have_text("live")
            expect(page.locator("#run-id")).to_have_text("seen")
            expect(page.locator("#countdown")).to_have_text("waiting")
            with running(*trainer(text, "--initial-peers", address)) as first:
                with running(*trainer(text, "--initial-peers", address)) as second:
                    expect(page.locator("#num-peers")).to_have_text("2", timeout=120_000)
                    label = page.locator("#loss-chart")
                    expect(label).to_have_attribute("aria-label", re.compile("to .* at step"), timeout=60_000)
                    page.reload()
                    expect(label).to_have_attribute("aria-label", re.compile("to .* at step"))
                    second.kill()
                expect(page.locator("#num-peers")).to_have_text("1", timeout=60_000)
                first.interrupt()
                assert first.wait(30) == INTERRUPTED
            assert httpx.get(f"{url}/healthz").status_code == 200
            began = time.monotonic()
            monitor.interrupt()
            assert monitor.wait(10) == INTERRUPTED
            assert time.monotonic() - began < 5.0
            expect(page.locator("#connection")).to_have_text("connection lost, trying again")


@pytest.mark.long
def test_trainer_shows_its_run(text: Path) -> None:
    with running(*trainer(text, "--web", "127.0.0.1:0")) as alone:
        url = url_of(alone)
        alone.wait_for("Optimizer step: done!")
        deadline = time.monotonic() + 30.0
        while not (points := httpx.get(f"{url}/api/points.json").json()["points"]) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert points[0]["samples"] >= 64
        assert httpx.get(f"{url}/api/run.json").json()["num_peers"] == 1
        alone.interrupt()
        assert alone.wait(30) == INTERRUPTED
        assert "Step #" not in alone.output  # the monitor in it is quiet


@pytest.mark.long
@pytest.mark.timeout(240)
def test_demo_keeps_the_page_until_interrupted() -> None:
    with running("demo", "--peers", "2", "--steps", "2", "--target-batch-size", "64", "--web", "127.0.0.1:0") as demo:
        url = demo.wait_for("The page of the run: ").split()[-1]
        demo.wait_for("The page stays until Ctrl-C: ")
        assert httpx.get(f"{url}/api/run.json").json()["committed_samples"] >= 64
        demo.interrupt()
        assert demo.wait(15) == 0
