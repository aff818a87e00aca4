"""Imports the packages of ``manyhands[albert]`` in one place, so that one error tells the user what to install."""

from __future__ import annotations

from manyhands.base.errors import MissingExtra

_NEEDED = ("tokenizers", "torch", "transformers")

try:
    import tokenizers
    import torch
    import transformers

    _ = transformers.AlbertForPreTraining  # transformers is imported lazily, which takes seconds
    # the bar would be drawn for each file of a checkpoint
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
except ModuleNotFoundError as error:
    if error.name not in _NEEDED:  # the package is installed but broken: its own error says more
        raise
    raise MissingExtra("the ALBERT recipe", "albert") from error

__all__ = ["tokenizers", "torch", "transformers"]
