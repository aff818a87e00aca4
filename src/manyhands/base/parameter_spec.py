"""Describes a tensor that peers share. Pure."""

from __future__ import annotations

import msgspec


class ParameterSpec(msgspec.Struct, frozen=True):
    """Name, shape and dtype of one tensor; dtype as in ``float32``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
