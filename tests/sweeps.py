"""Which of many cases `make test` runs; the others are for `make sim` or `make test-long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few_of(cases: Iterable[Any], num: int = 1, mark: pytest.MarkDecorator = pytest.mark.sweep) -> list[Any]:
    """The values of a parameter: the first ``num`` always run, the others are marked, as a sweep or as ``long``."""
    listed = list(cases)
    others = (case if isinstance(case, tuple) else (case,) for case in listed[num:])
    return [*listed[:num], *(pytest.param(*case, marks=mark) for case in others)]
