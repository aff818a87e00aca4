"""``manyhands demo``"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from manyhands.base.errors import ConfigError
from manyhands.cli.demo.child import Child, end_all
from manyhands.cli.demo.story import Story
from manyhands.cli.demo.view import LiveView, PlainView, View, print_summary
from manyhands.cli.train_command import require_albert
from manyhands.recipes.albert.corpus import load_documents

LEAVE_TIMEOUT_S = 3.0


def demo(
    *,
    peers: Annotated[int, Parameter(help="Trainers to start; the last of several is half as fast.")] = 3,
    steps: Annotated[int, Parameter(help="Global steps to make; a few more when the newcomer needs them.")] = 8,
    text: Annotated[tuple[Path, ...], Parameter(help="UTF-8 text files to train on.", consume_multiple=True)] = (),
    target_batch_size: Annotated[int, Parameter(help="Samples of one global step, by all trainers together.")] = 256,
    summary: Annotated[Path | None, Parameter(help="Write the outcome as JSON to this file.")] = None,
) -> int:
    """Train one small ALBERT on several peers of this machine, and see what happens when one of them dies.

    Starts a training monitor and the trainers as processes on loopback. Half-way one trainer is killed and a fresh one
    joins. Exit code 0 means that the held-out loss fell, all live peers hold the identical state, and the newcomer
    contributed.
    """
    for name, value in (("peers", peers), ("steps", steps), ("target-batch-size", target_batch_size)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}; it must be at least 1")
    require_albert()
    load_documents(text)  # a text that cannot be read is told before anything is started
    console = Console(highlight=False)
    view: View = LiveView(console, steps) if console.is_terminal else PlainView()
    started = time.monotonic()
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="manyhands-demo-") as folder:
        try:
            with view:
                story = Story(
                    children, Path(folder), view,
                    num_peers=peers, num_steps=steps, target_batch_size=target_batch_size, text=text,
                )  # fmt: skip
                story.run()
        finally:
            end_all(children, LEAVE_TIMEOUT_S)
    outcome = story.tally.summary(time.monotonic() - started)
    print_summary(console, outcome)
    sys.stdout.flush()
    if summary is not None:
        summary.write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=2) + b"\n")
    return 1 if outcome.problems else 0
