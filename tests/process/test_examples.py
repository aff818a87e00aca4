"""The programs in examples/ do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"


def test_quickstart_is_short() -> None:
    assert len(QUICKSTART.read_text().splitlines()) < 30


def test_quickstart_with_two_peers() -> None:
    command = [sys.executable, "-u", str(QUICKSTART)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        addresses = first.stdout.readline().split("quickstart.py ")[1].split()
        second = subprocess.run([*command, *addresses], stdout=subprocess.PIPE, text=True, timeout=90, check=True)
        output, _ = first.communicate(timeout=90)
        assert first.returncode == 0
    for text in (output, second.stdout):
        assert "global step 20, 2 peers" in text
