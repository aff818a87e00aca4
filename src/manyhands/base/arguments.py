"""Checks of what users pass to the public classes."""

from __future__ import annotations

import math
import operator
from typing import Any

from manyhands.base.errors import ConfigError


def whole(name: str, value: Any, *, least: int, example: int) -> int:
    """Return a count as an ``int``, also if it is one of numpy's or torch's integers.

    Raises:
        ConfigError: it is not a whole number, or below ``least``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ConfigError(f"{name}={value!r} must be a whole number; for example {example}")
    if number < least:
        raise ConfigError(f"{name}={number} must be at least {least}; for example {example}")
    return number


def number_of(value: Any) -> float:
    """Return a number of any type, including those of numpy and torch, as a float; NaN for anything else."""
    try:
        return math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def check_number(name: str, value: Any, *, example: float, may_be_zero: bool = False) -> None:
    """Raise ``ConfigError`` if a value is not a finite number above 0; ``may_be_zero`` allows 0 too."""
    if not (0 < number_of(value) < math.inf or (may_be_zero and number_of(value) == 0)):
        least = "of at least 0" if may_be_zero else "above 0"
        raise ConfigError(f"{name}={value!r} must be a finite number {least}; for example {example:g}")


def made_by(kind: type, example: str, **values: Any) -> None:
    """Raise ``ConfigError`` if a value is neither None nor an instance of a public class."""
    for name, value in values.items():
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name}={value!r} must be made by manyhands.{kind.__name__}; for example {example}")


def check_flags(*, may_be_none: bool = False, **flags: Any) -> None:
    """Raise ``ConfigError`` if a value is neither True nor False; Python would take the text ``"no"`` for True."""
    allowed = "True, False or None" if may_be_none else "True or False"
    for name, value in flags.items():
        if not isinstance(value, bool) and not (may_be_none and value is None):
            raise ConfigError(f"{name}={value!r} must be {allowed}")
