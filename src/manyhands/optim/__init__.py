"""The collaborative optimizer and its parts. Its rules are tables at the head of files without clocks or sockets:

====================================================  =================================================
question                                              file
====================================================  =================================================
what a peer does after a batch                        ``run/run_machine.py``
what its conditions mean                              ``run/tracker.py`` (``situation``)
whom it believes about where the run is               ``run/belief.py``
when its parameters differ from the others'           ``run/drift.py``
how it gets to where the run is                       ``state/catching_up.py``
what becomes of samples                               ``step/global_step.py``
====================================================  =================================================

``optimizer.py`` is what users call. The mean of a round goes from ``run/step_rounds.py`` through ``blocking_client.py``
to ``step/global_step.py``, and ``step/replica.py`` gives it to the torch optimizer as the gradient.
"""

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
