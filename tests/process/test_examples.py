"""The programs in examples/ do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.commands import Command

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWS = {"quickstart.py": ": 2 peers, loss", "averaging.py": "averaged by 2 peers"}
"""What each program prints when two peers work together."""


def test_every_example_is_tested_and_short() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SHOWS)
    for name in SHOWS:
        assert len((EXAMPLES / name).read_text().splitlines()) < 30


@pytest.mark.parametrize("name", SHOWS)
def test_with_two_peers(name: str) -> None:
    program = str(EXAMPLES / name)
    first = Command([program], module=None)
    second = None
    try:
        addresses = first.wait_for("others join with").split(f"{name} ")[1].split()
        second = Command([program, *addresses], module=None)
        first.wait_for(SHOWS[name])
        second.wait_for(SHOWS[name])
    finally:
        first.close()
        if second is not None:
            second.close()
