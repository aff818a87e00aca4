"""The page of a real run: a monitor shows trainers in a real browser: one dies, and one comes later."""

from __future__ import annotations

import json
import re
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from playwright.sync_api import expect

from manyhands.monitor.history import history_path
from tests.browser import chromium, found_chromium
from tests.process.commands import LOOPBACK, Command, address_of, running
from tests.process.test_monitor import text, trainer
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.process

INTERRUPTED = 130
GREY_WITHIN_S = 15.0
MAX_IN_A_STEP = 128
"""Samples: twice the target."""
URL = re.compile(r"The page of the run: (http://127\.0\.0\.1:\d+)")

__all__ = ["text"]


def url_of(command: Command) -> str:
    found = URL.search(command.wait_for("The page of the run: "))
    assert found is not None
    return found[1]


def used_by(path: Path) -> int:
    """The samples in committed steps of a trainer, by its own count."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return int(events[-1]["counts"]["samples_used"])


@pytest.mark.long
@pytest.mark.skipif(found_chromium() is None, reason="there is no Chromium here")
def test_monitor_shows_a_run_in_a_browser(text: Path, tmp_path: Path) -> None:
    with running("monitor", "--run-id", "seen", "--listen", LOOPBACK, "--web", "127.0.0.1:0") as monitor, \
            chromium() as browser:  # fmt: skip
        address, url = address_of(monitor), url_of(monitor)
        page = browser.new_page()
        page.goto(url)
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("#run-id")).to_have_text("seen")
        expect(page.locator("#countdown")).to_have_text("waiting")
        stop = tmp_path / "stop"
        options = ["--initial-peers", address, "--stop-file", str(stop), "--name"]
        first = trainer(text, *options, "<img src=x>", "--events", str(tmp_path / "first"))
        second = trainer(text, *options, "ada", "--events", str(tmp_path / "second"))
        third = trainer(text, *options, "eve", "--events", str(tmp_path / "third"))
        rows, curve = page.locator("#peers tbody tr"), page.locator("#loss-chart")
        with running(*first) as staying:
            with running(*second) as victim:
                expect(rows.filter(has_text="ada")).to_have_class("training")
                expect(curve).to_have_attribute("aria-label", re.compile("to .* at step"))
                page.reload()
                expect(curve).to_have_attribute("aria-label", re.compile("to .* at step"))
                expect(rows.filter(has_text="<img src=x>")).to_have_count(1)
                with running(*third) as newcomer:
                    expect(rows.filter(has_text="eve")).to_have_class("training")
                    expect(page.locator("#events")).to_contain_text("eve has joined")
                    expect(page.locator("#num-peers")).to_have_text("3")
                    expect(page.locator("#leaders")).to_contain_text("eve")
                    victim.kill()
                    expect(rows.filter(has_text="ada")).to_have_class("gone", timeout=GREY_WITHIN_S * 1000)
                    expect(page.locator("#num-peers")).to_have_text("2")
                    step = httpx.get(f"{url}/api/run.json").json()["step"] + 5
                    stop.write_text(str(step))
                    assert newcomer.wait() == 0, newcomer.output
                expect(rows.filter(has_text="eve")).to_have_class("left")
            assert staying.wait() == 0, staying.output
        leaders = page.locator("#leaders li")
        for name, file in (("<img src=x>", "first"), ("eve", "third")):
            credited = leaders.filter(has_text=name).locator(".much")
            expect(credited).to_have_text(f"{used_by(tmp_path / file):,}")
        shown = int(leaders.filter(has_text="ada").locator(".much").inner_text().replace(",", ""))
        counted = used_by(tmp_path / "second")
        assert counted <= shown <= counted + MAX_IN_A_STEP, (
            "its last step is known to the others, perhaps not to itself"
        )
        assert httpx.get(f"{url}/healthz").status_code == 200
        monitor.interrupt()
        assert monitor.wait() == INTERRUPTED
        expect(page.locator("#connection")).to_have_text("connection lost, trying again")


@pytest.mark.long
@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="limits of another process can be set on Linux only")
def test_page_lives_on_while_the_disk_is_full(text: Path, tmp_path: Path) -> None:
    kept = ("--state-dir", str(tmp_path))
    with running("monitor", "--run-id", "seen", "--listen", LOOPBACK, "--web", "127.0.0.1:0", *kept) as monitor:
        address, url = address_of(monitor), url_of(monitor)
        can_write(monitor, is_possible=False)
        with running(*trainer(text, "--initial-peers", address)) as alone:
            monitor.wait_for("The history cannot be written to ")
            before = wait_for_points(url, 2)
            after = wait_for_points(url, len(before) + 2)  # as many steps later
            assert httpx.get(f"{url}/healthz").status_code == 200
            can_write(monitor, is_possible=True)
            monitor.wait_for("The history is written to ")
            alone.interrupt()
            assert alone.wait() == INTERRUPTED
        monitor.interrupt()
        assert monitor.wait() == INTERRUPTED
    assert monitor.output.count("[WARNING] The history cannot be written") == 1
    with closing(sqlite3.connect(history_path(tmp_path, "seen"))) as file:
        written = {step for (step,) in file.execute("SELECT step FROM points")}
    assert written >= {point["step"] for point in after}


def can_write(command: Command, *, is_possible: bool) -> None:
    """Let a process write to files, or have each write fail, as on a full disk."""
    most = psutil.RLIM_INFINITY if is_possible else 0
    psutil.Process(command.pid).rlimit(psutil.RLIMIT_FSIZE, (most, psutil.RLIM_INFINITY))


def wait_for_points(url: str, number: int) -> list[Any]:
    """The points of the curve, once there are so many."""
    points: list[Any] = []

    def are_there() -> bool:
        points[:] = httpx.get(f"{url}/api/points.json", timeout=PATIENCE_S).json()["points"]
        return len(points) >= number

    wait_until(are_there, f"the curve has {number} points")
    return points


@pytest.mark.long
def test_trainer_shows_its_run(text: Path) -> None:
    with running(*trainer(text, "--web", "127.0.0.1:0")) as alone:
        url = url_of(alone)
        alone.wait_for("Optimizer step: done!")
        assert wait_for_points(url, 1)[0]["samples"] >= 64
        assert httpx.get(f"{url}/api/run.json").json()["num_peers"] == 1
        alone.interrupt()
        assert alone.wait() == INTERRUPTED
        assert "Step #" not in alone.output  # the monitor in it is quiet


@pytest.mark.long
def test_demo_keeps_the_page_until_interrupted() -> None:
    with running("demo", "--peers", "2", "--steps", "2", "--target-batch-size", "64", "--web", "127.0.0.1:0") as demo:
        url = demo.wait_for("The page of the run: ").split()[-1]
        demo.wait_for("The page stays until Ctrl-C: ")
        assert httpx.get(f"{url}/api/run.json").json()["committed_samples"] >= 64
        demo.interrupt()
        assert demo.wait() == 0


@pytest.mark.long
def test_playground_fills_a_mask_with_the_kept_state(text: Path, tmp_path: Path) -> None:
    keeping = ("--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "1", "--playground")
    with running("monitor", "--run-id", "seen", "--listen", LOOPBACK, "--web", "127.0.0.1:0", *keeping) as monitor:
        address, url = address_of(monitor), url_of(monitor)
        with running(*trainer(text, "--initial-peers", address, "--max-steps", "30")) as alone:
            monitor.wait_for("Saving a checkpoint at global step")
            assert alone.wait() == 0  # then checkpoints come and go no more
        answer = httpx.get(f"{url}/api/fill.json", params={"text": "the [MASK] of"}, timeout=PATIENCE_S).json()
        assert len(answer["guesses"]) == 1
        assert all(0.0 <= guess["share"] <= 1.0 for guess in answer["guesses"][0])
        assert answer["text"].startswith("the ")


COMPUTING = """
import time, torch
from manyhands.cli import leaving
from manyhands.cli.web_page import page_of
from manyhands.monitor.web import Filled, bind
from tests.synthetic_run import SyntheticRun

def fill(text):
    print("computing", flush=True)
    while True:
        torch.randn(500, 500) @ torch.randn(500, 500)

leaving.LEAVE_TIMEOUT_S = 600.0  # it leaves by itself
try:
    with leaving.leaving_on_signals(), bind("127.0.0.1:0") as bound, page_of(SyntheticRun(3, time.time()), bound, fill):
        print("http://127.0.0.1:%d" % bound.getsockname()[1], flush=True)
        time.sleep(600.0)
except KeyboardInterrupt:
    leaving.finish(130)
"""


@pytest.mark.long
def test_model_that_computes_neither_holds_up_ctrl_c_nor_crashes() -> None:
    command = Command(["-c", COMPUTING], module=None, folder=Path(__file__).parents[2])
    with closing(command), ThreadPoolExecutor(1) as asking:
        url = command.wait_for("http://").strip()
        asking.submit(httpx.get, f"{url}/api/fill.json", params={"text": "a [MASK]"}, timeout=PATIENCE_S)
        command.wait_for("computing")
        command.interrupt()
        assert command.wait() == INTERRUPTED
