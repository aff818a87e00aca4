"""CSV files of points and peers. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def as_csv(kind: type[msgspec.Struct], pieces: Iterable[Iterable[msgspec.Struct]], unit: str) -> Iterator[str]:
    """Yield a table with a head, in pieces.

    Text that a spreadsheet would take for a formula gets a ``'`` in front, since strangers have chosen it.

    Args:
        kind: the class of the rows.
        pieces: lists of rows, each made when the one before has been taken.
        unit: of their samples; the last column.
    """
    yield _lines([[*kind.__struct_fields__, "unit"]])
    for rows in pieces:
        yield _lines([*(_safe(getattr(row, name)) for name in kind.__struct_fields__), unit] for row in rows)


def _lines(rows: Iterable[Iterable[Any]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\r\n").writerows(rows)  # RFC 4180
    return file.getvalue()


def _safe(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip(" ").startswith(FORMULA_STARTS):
        return "'" + value
    return value
