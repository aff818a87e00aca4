"""``manyhands fill``: try a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from manyhands.base.errors import ConfigError
from manyhands.checkpoints.checkpoint_dir import newest_checkpoint
from manyhands.cli.output.live_view import waiting
from manyhands.cli.taking_part import require_albert

MASK = "[MASK]"
MODEL_FILE = "config.json"


def fill(
    folder: Annotated[Path, Parameter(help="The checkpoint folder of a trainer, or one checkpoint in it.")],
    text: Annotated[str, Parameter(help=f"A text with one or more {MASK}.")],
) -> None:
    """Fill each [MASK] in a text with a trained model, and print the likeliest tokens.

    For example:

        manyhands fill manyhands-my-albert "The capital of [MASK] is ..."
    """
    path = folder if (folder / MODEL_FILE).exists() else newest_checkpoint(folder)
    if MASK not in text:
        raise ConfigError(f'the text has no {MASK} for the model to fill; for example "The capital of {MASK} is ..."')
    if text.encode("utf-8", "ignore").decode() != text:
        raise ConfigError("the text is not UTF-8; give it from a terminal or a script that uses UTF-8")
    require_albert()
    with waiting("Loading PyTorch and the model"):
        from manyhands.recipes.albert.fill import MaskFiller

        filled = MaskFiller(path).fill(text)
    print(filled.text)  # noqa: T201
    for number, guesses in enumerate(filled.guesses, start=1):
        if len(filled.guesses) > 1:
            print(f"{MASK} {number}:")  # noqa: T201
        for guess in guesses:
            print(f"  {guess.probability:6.1%}  {guess.token}")  # noqa: T201
