"""The collaborative optimizer and its parts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from manyhands.base.errors import MissingExtra
from manyhands.optim.config import ProgressConfig

if TYPE_CHECKING:
    from manyhands.optim.lamb import Lamb

__all__ = ["Lamb", "ProgressConfig"]


def __getattr__(name: str) -> Any:
    if name != "Lamb":
        raise AttributeError(f"module 'manyhands.optim' has no attribute {name!r}")
    try:  # on first use only: it imports torch, which monitors never need
        return importlib.import_module("manyhands.optim.lamb").Lamb
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("manyhands.optim.Lamb", "torch") from None


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
