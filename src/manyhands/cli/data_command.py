"""``manyhands data``"""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from manyhands.cli.taking_part import require_albert
from manyhands.recipes.albert.preparation import Preparation

data = App(name="data", help="Prepare data for trainers.")


@data.command
def prepare(settings: Annotated[Preparation | None, Parameter(name="*")] = None) -> None:
    """Make the samples that trainers learn from, once for all of them.

    WikiText-103 by default, with the tokenizer of ALBERT. For text of your own,
    and without a download:

        manyhands data prepare --text book.txt --train-tokenizer

    Trainers that are started in the same folder find what it makes.
    """
    settings = settings or Preparation()
    require_albert()
    from manyhands.recipes.albert.prepare import prepare as make  # takes seconds: it imports torch

    result = make(settings)
    about = result.about
    lines = [
        f"Samples of up to {about.seq_length} tokens in {result.folder}: {about.num_samples['train']} for training, "
        f"{about.num_samples['validation']} for validation",
        f"Tokenizer of {about.vocab_size} tokens: {about.tokenizer}",
    ]
    if settings.shards is not None:
        lines.append(f"Shards: {result.folder / 'shards'}")
    if settings.archive is not None:
        packed = "" if settings.archive.suffix == ".tar" else "z"
        lines += [
            f"Archive to host: {settings.archive}, SHA-256 {result.sha256}",
            f"Others unpack it where they start their trainer: curl -L URL | tar x{packed}f -",
        ]
    print("\n".join(lines))  # noqa: T201
