"""Takes the screenshots of the page for the documentation, of a made-up run: ``make screenshots``.

    python -m tests.screenshots [--out docs/img]

They are small PNG files: ``page.png``, ``page-dark.png`` and ``page-phone.png``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, expect

from manyhands.monitor.picture import PeerRow
from manyhands.monitor.web import bind
from manyhands.monitor.web.server import PageServer
from tests.browser import chromium
from tests.synthetic_run import SyntheticRun

DESKTOP = {"width": 1200, "height": 1180}
PHONE = {"width": 390, "height": 844}
MAX_BYTES = 200_000


def made_up_run() -> SyntheticRun:
    """A run in which something has happened."""
    run = SyntheticRun(40, time.time(), past_steps=1500, grows=True)
    peers = run.picture().peers
    run.set_state(peers[4].peer_id, "gone")
    run.set_state(peers[9].peer_id, "left")
    for kind, text, ago_s in (
        ("joined", "Maple has joined", 70.0),
        ("died", f"{shown(peers[4])} has published nothing for a while, and is considered gone", 260.0),
        ("aborted", "quokka could not make step 700: it lost its connection to two members of its group", 265.0),
        ("reloaded", "old laptop has loaded the state of the others, as it was behind", 1500.0),
        ("left", f"{shown(peers[9])} has left", 2700.0),
        ("joined", "north star has joined again", 3300.0),
        ("refused", "1 invalid record of other peers was refused", 7400.0),
    ):
        run.tell(kind, text, ago_s)
    run.advance(24.0)
    return run


def shown(peer: PeerRow) -> str:
    """As events name a peer."""
    return peer.name or f"peer ...{peer.peer_id[-6:]}"


def shoot(browser: Browser, url: str, path: Path, viewport: dict[str, int], scheme: str, **more: Any) -> None:
    """Take one screenshot."""
    context = browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce", **more)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#loss-chart canvas")).to_be_visible()
    expect(page.locator("#leaders li").first).to_be_visible()
    expect(page.locator("#connection")).to_have_text("live")
    page.screenshot(path=path)
    context.close()
    size = path.stat().st_size
    print(f"{path}: {size / 1000:.0f} kB")
    if size > MAX_BYTES:
        raise SystemExit(f"{path} is too large for the repository: at most {MAX_BYTES} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/img"), help="folder for the files")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    run = made_up_run()
    own = run.picture().peers[6].peer_id
    server = PageServer(run, bind("127.0.0.1:0"))
    server.start()
    with chromium() as browser:
        shoot(browser, server.url, out / "page.png", DESKTOP, "light")
        shoot(browser, server.url, out / "page-dark.png", DESKTOP, "dark")
        shoot(browser, f"{server.url}/?peer={own}", out / "page-phone.png", PHONE, "light", device_scale_factor=1.5)
    server.close()


if __name__ == "__main__":
    main()
