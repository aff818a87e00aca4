"""``manyhands fill``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from manyhands.base.errors import ConfigError
from manyhands.cli.taking_part import require_albert
from manyhands.recipes.albert.checkpoint_dir import newest_checkpoint

MASK = "[MASK]"
MODEL_FILE = "config.json"


def fill(
    folder: Annotated[Path, Parameter(help="Where a trainer keeps its checkpoints; or one of these.")],
    text: Annotated[str, Parameter(help=f"A text with {MASK} in it, once or several times.")],
) -> None:
    """Try a model that was trained: it fills the [MASK] in a text, and says how sure it is.

    For example:

        manyhands fill manyhands-my-albert "The capital of [MASK] is ..."
    """
    path = checkpoint_in(folder)
    if MASK not in text:
        raise ConfigError(f'the text has no {MASK} for the model to fill; for example "The capital of {MASK} is ..."')
    require_albert()
    from manyhands.recipes.albert.fill import fill_masks  # takes seconds: it imports torch

    filled = fill_masks(path, text)
    print(filled.text)  # noqa: T201
    for number, guesses in enumerate(filled.guesses, start=1):
        if len(filled.guesses) > 1:
            print(f"{MASK} {number}:")  # noqa: T201
        for guess in guesses:
            print(f"  {guess.probability:6.1%}  {guess.token}")  # noqa: T201


def checkpoint_in(folder: Path) -> Path:
    """The newest checkpoint in a folder, or the folder itself if it is one.

    Raises:
        ConfigError: there is none.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no folder; name the one where a trainer keeps its checkpoints, for example manyhands-RUN_ID"
        )
    if (folder / MODEL_FILE).exists():
        return folder
    path = newest_checkpoint(folder)
    if path is None:
        raise ConfigError(
            f"there is no checkpoint in {folder}; a trainer saves one every --checkpoint-every global steps, "
            "and at its end"
        )
    return path
