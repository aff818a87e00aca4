"""``manyhands demo``: a whole run on one machine."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from manyhands.base.errors import ConfigError, ManyhandsError
from manyhands.cli.demo.child import Child, end_all
from manyhands.cli.demo.story import MONITOR_EVENTS, Story
from manyhands.cli.demo.tally import Summary
from manyhands.cli.demo.view import MIN_WIDTH, DemoView, LiveDemoView, PlainView, print_summary
from manyhands.cli.taking_part import require_albert
from manyhands.cli.web_page import WebOptions
from manyhands.monitor.plot import plot
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.data.corpus import load_documents

LEAVE_TIMEOUT_S = 3.0
CHART = Path("demo.png")


def demo(
    *,
    peers: Annotated[int, Parameter(help="Trainers to start; the last of several is half as fast.")] = 3,
    steps: Annotated[int, Parameter(help="Global steps to make; a few more when the newcomer needs them.")] = 8,
    text: Annotated[tuple[Path, ...], Parameter(help="UTF-8 text files to train on.", consume_multiple=True)] = (),
    target_batch_size: Annotated[int, Parameter(help="Samples of one global step, by all trainers together.")] = 256,
    summary: Annotated[Path | None, Parameter(help="Write the outcome as JSON to this file.")] = None,
    web: WebOptions = WebOptions(),
) -> int:
    """Train one small ALBERT on several peers of this machine, and see what happens when one of them dies.

    Starts a training monitor and the trainers as processes on loopback. Half-way one trainer is killed and a fresh one
    joins. Exit code 0 means that the held-out loss fell, all live peers hold the identical state, and the newcomer
    contributed. The curves are drawn into demo.png, with the extra manyhands[plot]. With --web, the page of the run
    stays until Ctrl-C.
    """
    for name, value in (("peers", peers), ("steps", steps), ("target-batch-size", target_batch_size)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}; it must be at least 1")
    require_albert()
    with web.taken():
        pass  # the monitor takes it
    check_text(text)
    writer = SummaryFile(summary)
    console = Console(highlight=False)
    view: DemoView = LiveDemoView(console) if fits(console) else PlainView()
    started = time.monotonic()
    children: list[Child] = []
    problem = ""
    with tempfile.TemporaryDirectory(prefix="manyhands-demo-") as folder:
        story = Story(
            children, Path(folder), view,
            num_peers=peers, num_steps=steps, target_batch_size=target_batch_size, text=text, web=web.address,
        )  # fmt: skip
        try:
            try:
                with view:
                    story.run()
            except ConfigError:
                raise
            except ManyhandsError as error:
                problem = str(error)
            if web.address is None:
                end_all(children, LEAVE_TIMEOUT_S)
            about_chart = draw_chart(Path(folder), CHART) if not problem else ""
            outcome = story.tally.summary(time.monotonic() - started, problem)
            print_summary(console, outcome)
            if about_chart:
                console.print(about_chart, markup=False, soft_wrap=True)
            writer.write(outcome)
            if web.address is not None:
                stay(story.tally.page, console)
        finally:
            end_all(children, LEAVE_TIMEOUT_S)
    return 1 if outcome.problems else 0


def fits(console: Console) -> bool:
    """Whether the live view can be drawn and read: in a wide terminal, whatever FORCE_COLOR says (notebooks set it)."""
    return sys.stdout.isatty() and console.is_interactive and console.width >= MIN_WIDTH


def stay(page: str, console: Console) -> None:
    """Keep the page up until Ctrl-C."""
    console.print(f"The page stays until Ctrl-C: {page}", highlight=False)
    try:
        while True:  # an unbounded wait cannot be interrupted on every platform
            threading.Event().wait(3600.0)
    except KeyboardInterrupt:
        return


def draw_chart(folder: Path, output: Path) -> str:
    """Draw the curves of all event files in a folder, if matplotlib is installed; returns a line that says so."""
    files = sorted(folder.glob("*.jsonl"), key=lambda path: (path.name != MONITOR_EVENTS, path.name))
    try:
        plot(files, output)
    except ConfigError as error:  # the demo itself went well
        return f"No chart was drawn: {error}"
    return f"The curves are in {output}."


def check_text(text: tuple[Path, ...]) -> None:
    """Check that a user's text is readable and long enough, before anything is started.

    Raises:
        ConfigError: it is not.
    """
    documents = load_documents(text)
    if not text:  # Python's own documentation is long enough
        return
    from manyhands.recipes.albert.data.samples import make_samples  # imports torch, which takes seconds
    from manyhands.recipes.albert.data.tokenizer import train_tokenizer

    recipe = AlbertRecipe(text=text)
    make_samples(documents, train_tokenizer(documents, recipe.vocab_size), recipe)


class SummaryFile:
    """Writes the summary as JSON; without a path, does nothing.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            try:
                path.touch()
            except OSError as error:
                raise ConfigError(f"--summary {path}: {error.strerror}; name a file that can be written") from error

    def write(self, summary: Summary) -> None:
        if self._path is not None:
            self._path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
