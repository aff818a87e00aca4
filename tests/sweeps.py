"""Which of many cases `make test` runs; the others are for `make sim`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few_of(cases: Iterable[Any], num: int = 1) -> list[Any]:
    """The values of a parameter: the first ``num`` always run, the others are marked as a sweep."""
    listed = list(cases)
    others = (case if isinstance(case, tuple) else (case,) for case in listed[num:])
    return [*listed[:num], *(pytest.param(*case, marks=pytest.mark.sweep) for case in others)]
