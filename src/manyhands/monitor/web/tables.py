"""CSV files of points and peers. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

import msgspec

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def as_csv(kind: type[msgspec.Struct], rows: Iterable[msgspec.Struct]) -> str:
    """A table with a head. Text that a spreadsheet would compute gets a ``'`` in front: strangers have chosen it.

    Args:
        kind: the class of the rows.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\r\n")  # RFC 4180
    writer.writerow(kind.__struct_fields__)
    for row in rows:
        writer.writerow([_safe(getattr(row, name)) for name in kind.__struct_fields__])
    return file.getvalue()


def _safe(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip(" ").startswith(FORMULA_STARTS):
        return "'" + value
    return value
