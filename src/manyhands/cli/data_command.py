"""``manyhands data``: prepare, verify and serve training data."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from manyhands.base.errors import MissingExtra
from manyhands.cli.open_files import raise_open_files_limit
from manyhands.cli.output.live_view import waiting
from manyhands.cli.output.logs import log_to_stdout
from manyhands.cli.taking_part import require_albert
from manyhands.recipes.albert.data.preparation import Preparation

data = App(name="data", help="Prepare data for trainers, host it, and check it.")


@data.command
def prepare(settings: Annotated[Preparation, Parameter(name="*")] = Preparation()) -> None:
    """Make training samples, once for all trainers.

    WikiText-103 by default, with the tokenizer of ALBERT. For text of your own,
    and without a download:

        manyhands data prepare --text book.txt --train-tokenizer

    Trainers that are started in the same folder find the samples.
    """
    require_albert()
    settings.check()
    with waiting("Loading PyTorch and transformers"):
        from manyhands.recipes.albert.data.dataset import SHARDS, address_of
        from manyhands.recipes.albert.data.prepare import prepare as make

    result = make(settings)
    about = result.about
    lines = [
        f"Samples of up to {about.seq_length} tokens in {result.folder}: {about.num_samples['train']} for training, "
        f"{about.num_samples['validation']} for validation",
        f"Tokenizer of {about.vocab_size} tokens: {about.tokenizer}",
    ]
    if settings.shards is not None:
        shards = result.folder / SHARDS
        lines.append(f"Shards: {shards}; on this machine: manyhands train --dataset-url {address_of(shards)}")
    if settings.archive is not None:
        packed = "" if settings.archive.suffix == ".tar" else "z"
        lines += [
            f"Archive to host: {settings.archive}, SHA-256 {result.sha256}",
            f"Others unpack it where they start their trainer: curl -L URL | tar x{packed}f -",
        ]
    print("\n".join(lines))  # noqa: T201


@data.command
def verify(
    place: Annotated[str, Parameter(help="Folder with an index.json or manyhands.json, or an address.")], /
) -> int:
    """Check the SHA-256 of shards and samples.

    Shards at an address are downloaded first. Prints a line for each problem; the
    exit code is 1 if there is one. For example:

        manyhands data verify data/shards
    """
    require_albert()
    from manyhands.recipes.albert.data.verify import problems_of

    num_problems = 0
    columns = (TextColumn("Checking the data"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("", total=None)
        for problem in problems_of(place, lambda done, total: progress.update(task, advance=done, total=total)):
            num_problems += 1
            progress.console.print(problem, markup=False, highlight=False, soft_wrap=True)
    if not num_problems:
        print(f"{place}: no problems")  # noqa: T201
    return 1 if num_problems else 0


@data.command
def serve(
    folder: Annotated[Path, Parameter(help="Folder with shards: manyhands data prepare --shards 8 makes one.")],
    /,
    *,
    listen: Annotated[str, Parameter(help="HOST:PORT; 8000 alone means all interfaces.")] = "8000",
) -> None:
    """Serve shards to trainers over HTTP, and log each download.

    Prints the option that trainers need to fetch them. Runs until Ctrl-C. For
    example:

        manyhands data serve data/shards
    """
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise MissingExtra("serving data", "data")
    require_albert()
    log_to_stdout(verbose=False)
    raise_open_files_limit()  # each trainer takes two
    from manyhands.recipes.albert.data.serving import serve as serve_folder

    serve_folder(folder, listen)
