"""The collaborative optimizer and its parts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from manyhands.optim.config import ProgressConfig

if TYPE_CHECKING:
    from manyhands.optim.lamb import Lamb

__all__ = ["Lamb", "ProgressConfig"]


def __getattr__(name: str) -> Any:
    if name == "Lamb":  # on first use only: it imports torch, which monitors never need
        return importlib.import_module("manyhands.optim.lamb").Lamb
    raise AttributeError(f"module 'manyhands.optim' has no attribute {name!r}")
