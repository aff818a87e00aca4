"""``manyhands demo``: a whole run on one machine."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import msgspec

from manyhands.base.errors import ConfigError, ManyhandsError
from manyhands.cli.demo.story import MONITOR_EVENTS, DemoOptions, Story
from manyhands.cli.demo.tally import Tally
from manyhands.cli.demo.view import DemoView, card_of
from manyhands.cli.output.card import print_card
from manyhands.cli.output.live_view import console_of
from manyhands.cli.taking_part import require_albert
from manyhands.cli.web_page import place_of
from manyhands.monitor.plot import plot
from manyhands.monitor.web.address import url_of
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.data.corpus import load_documents

CHART = Path("demo.png")


def demo(*, options: DemoOptions = DemoOptions()) -> int:
    """Train one small ALBERT on several peers of this machine, and see what happens when one of them dies.

    Starts a training monitor and the trainers as processes on loopback. Half-way one trainer is killed and a fresh one
    joins. Exit code 0 means that the held-out loss fell, all live peers hold the identical state, and the newcomer
    contributed. The curves are drawn into demo.png, with the extra manyhands[plot]. With --web, the page of the run
    stays until Ctrl-C. With --liar, one trainer lies in place of that death, and the summary says who noticed it.
    """
    require_albert()
    tally = Tally(planned_steps=options.steps)
    with options.web.taken() as bound:  # only checked here: the monitor binds it again
        web = place_of(bound) if bound is not None else None
        tally.page = url_of(bound) if bound is not None else ""
    check_text(options.text)
    check_summary(options.summary)
    view = DemoView(console_of(sys.stdout), tally)
    started = time.monotonic()
    problem = ""
    with (
        tempfile.TemporaryDirectory(prefix="manyhands-demo-") as folder,
        closing(Story(options, Path(folder), tally, view, web=web)) as story,
    ):
        try:
            with view:
                story.run()
        except ConfigError:
            raise
        except ManyhandsError as error:
            problem = str(error)
        if not tally.page:
            story.close()
        summary = tally.summary(time.monotonic() - started, problem)
        print_card(card_of(summary))
        if not problem:
            print(draw_chart(Path(folder), CHART), flush=True)  # noqa: T201
        if options.summary is not None:
            options.summary.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        if tally.page:
            stay(tally.page)
    return 1 if summary.problems else 0


def stay(page: str) -> None:
    """Keep the page up until Ctrl-C."""
    print(f"The page stays until Ctrl-C: {page}", flush=True)  # noqa: T201
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


def check_summary(path: Path | None) -> None:
    """Check that the summary can be written, before anything is started.

    Raises:
        ConfigError: it cannot.
    """
    try:
        if path is not None:
            path.touch()
    except OSError as error:
        raise ConfigError(f"--summary {path}: {error.strerror}; name a file that can be written") from error
