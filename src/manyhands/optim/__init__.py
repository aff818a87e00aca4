"""The collaborative optimizer and its parts. Its rules are at the heads of these files, most of them as tables:

====================================================  =================================================
question                                              file
====================================================  =================================================
What does a peer do after a batch?                    ``run/run_machine.py``
What do the conditions for that mean?                 ``run/run_machine.py`` (``Situation``)
How are these computed?                               ``run/tracker.py`` (``situation``)
Which claims about the run's position are believed?   ``run/belief.py``
When do a peer's parameters differ from the others'?  ``run/drift.py``
What happens when a run has split?                    ``run/branches.py``
How does a newcomer get its place in the run?         ``state/catching_up.py``
How does a peer get to the position of the run?       ``state/catching_up.py``
What do the others learn when a peer leaves?          ``run/collaboration.py`` (``Collaboration.close``)
What becomes of a peer's samples?                     ``step/global_step.py``
How does the averaged gradient reach the parameters?  ``step/global_step.py``
====================================================  =================================================

``run/`` is one peer's view of the run, from the others' records, with its decisions and rounds. ``step/`` leads from a
peer's gradients to the new parameters of one global step. ``state/`` captures, checks and loads the state of a run.
Users call ``optimizer.py``. It works on the training thread, and calls ``run/collaboration.py`` on the network thread
through ``blocking_client.py``.
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
    try:  # on first use only, as it imports torch, which monitors do not need
        return importlib.import_module("manyhands.optim.lamb").Lamb
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("manyhands.optim.Lamb", "torch") from None


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
