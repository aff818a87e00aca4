"""A real browser for the tests of the page and its screenshots."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, expect, sync_playwright

expect.set_options(timeout=240_000)  # milliseconds; a busy machine takes long

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def found_chromium() -> str | None:
    """The path of the system's Chromium, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium.

    Raises:
        RuntimeError: there is none.
    """
    path = found_chromium()
    if path is None:
        raise RuntimeError(f"there is no Chromium here; install one of: {', '.join(NAMES)}")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()
