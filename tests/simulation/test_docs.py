"""The program in docs/reference/testing.md runs, and says what the page says."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "testing.md"


def test_the_program_on_the_page_runs() -> None:
    match = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert match is not None
    namespace: dict[str, object] = {}
    exec(compile(match.group(1), str(PAGE), "exec"), namespace)
    assert namespace["seen"] == {name: ["a", "b", "c"] for name in "abc"}
