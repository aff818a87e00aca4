"""Each line that the docs quote is one that the code prints."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LOGGED = re.compile(r"^[A-Z][a-z]{2} \d\d \d\d:\d\d:\d\d\.\d{3} \[[A-Z]+\] (.+)$")
HEADINGS = {"symptom", "line", "message", "the error says", "the line says"}
"""Of columns of tables that quote lines."""
FIELD, ELISION = "\0", "\1"
"""Stands for any text: in what the code has a value there, in what the docs have dots."""
PERCENT = re.compile(r"%[-+ #0]*(?:\d+|\*)?(?:\.\d+)?[sdgfiruxc]")
NEVER = -math.inf
MIN_PIECE = 5
"""Characters in one piece of fixed text that a quoted line has in common with its source, at least."""
LEAST_SHARE = 0.25
"""Of a quoted line: most of some lines are values."""


def templates() -> Iterator[str]:
    """The texts in the code, with ``FIELD`` for each value."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else FIELD for part in node.values]
                yield PERCENT.sub(FIELD, "".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield PERCENT.sub(FIELD, node.value).replace("%%", "%")


def quoted(page: Path) -> Iterator[str]:
    """The lines that a page quotes: in examples of logs, and in tables of messages."""
    column = None
    for line in page.read_text(encoding="utf-8").splitlines():
        if found := LOGGED.match(line):
            yield found[1]
        if not line.startswith("|"):
            column = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if column is None:
            column = next((number for number, cell in enumerate(cells) if cell in HEADINGS), -1)
        elif column >= 0 and column < len(cells):
            yield from re.findall(r"`([^`]+)`", cells[column])


def fixed_text(quote: str, template: str) -> int:
    """How many characters of a quote are fixed text of a template that can give it; -1 if it cannot."""

    @functools.cache
    def best(at: int, place: int) -> float:
        """Of the rest of the quote, as the beginning of what the rest of the template gives."""
        if at == len(quote):
            return 0
        if quote[at] == ELISION:
            return max(best(at + 1, rest) for rest in range(place, len(template) + 1))
        if place == len(template):
            return NEVER
        if template[place] == FIELD:
            return max(best(at, place + 1), best(at + 1, place))
        return 1 + best(at + 1, place + 1) if quote[at] == template[place] else NEVER

    return max(best(0, place) for place in range(len(template)))


def is_printed(quote: str, known: Iterable[str]) -> bool:
    """Whether one of the templates can give a quote, and enough of it is fixed text of that template."""
    quote = re.sub(r"\s*(\.{3}|…)\s*", ELISION, quote)
    size = len(quote.replace(ELISION, ""))
    near = [
        one
        for one in known
        if quote in one or any(len(piece) >= MIN_PIECE and piece.strip() in quote for piece in one.split(FIELD))
    ]
    near.sort(key=lambda one: max((len(piece) for piece in one.split(FIELD) if piece.strip() in quote), default=0))
    return any(fixed_text(quote, template) / size > LEAST_SHARE for template in reversed(near))


@pytest.fixture(scope="module")
def known() -> list[str]:
    return list(dict.fromkeys(templates()))


def test_each_quoted_line_is_one_that_the_code_prints(known: list[str]) -> None:
    """In ``make test`` although it takes 3 s, most of them to parse all of the code: any change can break it."""
    lines = {quote: page.relative_to(ROOT) for page in PAGES for quote in quoted(page)}
    assert len(lines) > 50
    unknown = [f"{page}: {quote}" for quote, page in lines.items() if not is_printed(quote, known)]
    assert not unknown, "no code prints this:\n" + "\n".join(unknown)


def test_a_line_that_no_code_prints_is_found(known: list[str]) -> None:
    assert not is_printed("A micro-batch of 4 samples takes 4.5 s here", known)
    assert is_printed("A batch of 4 samples takes 4.50 s: the next ...", known)
