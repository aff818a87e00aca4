"""The programs in examples/ do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.commands import Command

pytestmark = pytest.mark.process

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"


def test_quickstart_is_short() -> None:
    assert len(QUICKSTART.read_text().splitlines()) < 30


def test_quickstart_with_two_peers() -> None:
    first = Command([str(QUICKSTART)], module=None)
    second = None
    try:
        addresses = first.wait_for("others join with").split("quickstart.py ")[1].split()
        second = Command([str(QUICKSTART), *addresses], module=None)
        first.wait_for(": 2 peers, loss")
        second.wait_for(": 2 peers, loss")
    finally:
        first.close()
        if second is not None:
            second.close()
