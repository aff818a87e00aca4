"""The command line: ``manyhands join | train | monitor | first-peer | ticket | run | invite | aws | doctor | demo``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, get_args

from cyclopts import App, ArgumentCollection, CycloptsError, Group, Parameter
from cyclopts.exceptions import CoercionError, UnknownOptionError, UnusedCliTokensError

from manyhands.base.errors import ConfigError, JoinFailed, ManyhandsError
from manyhands.base.text import reason_of
from manyhands.base.ticket import Ticket
from manyhands.cli.access_commands import ban, invite, members
from manyhands.cli.aws_command import aws
from manyhands.cli.checkpoint_command import checkpoint
from manyhands.cli.data_command import data
from manyhands.cli.demo.command import demo
from manyhands.cli.doctor_command import doctor
from manyhands.cli.entry import EXIT_INTERRUPTED
from manyhands.cli.evaluate_command import evaluate
from manyhands.cli.fill_command import fill
from manyhands.cli.first_peer_command import first_peer
from manyhands.cli.join_command import join
from manyhands.cli.leaving import leaving_on_signals
from manyhands.cli.monitor_command import monitor
from manyhands.cli.notebook_command import notebook
from manyhands.cli.old_names import ANY, JOIN, Translation, help_of
from manyhands.cli.output.logs import redirect_stdout_to
from manyhands.cli.plan_command import plan
from manyhands.cli.plot_command import plot
from manyhands.cli.run_command import run_key
from manyhands.cli.ticket_command import ticket
from manyhands.cli.train_command import settings_given, train
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.version import __version__

KINDS: dict[type | None, str] = {
    int: "a whole number, for example 4",
    float: "a number, for example 0.5",
    timedelta: "a number with s, m, h or d, for example 7d",
}
"""Descriptions of the values that an option accepts, by its type."""
OUT_OF_MEMORY = ("allocate memory", "failed to map segment", "start new thread")
"""Texts in errors for lack of memory: of torch, of the loader of libraries, and of Python's threads."""
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


def _refuse_fractions(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Raises ``CoercionError`` for a fraction where a whole number is needed: cyclopts would round it."""
    for argument in arguments:
        if int not in (argument.hint, *get_args(argument.hint)):
            continue
        for token in argument.tokens:
            if "." in token.value:
                raise CoercionError(token=token, argument=argument, target_type=int)


def _shown(default: object) -> str | None:
    """A default value as a user would write it; None if there is none to show."""
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or None
    return str(default) if default is not None else None


app = App(
    name="manyhands",
    help="Train one neural network together, over the internet, on whatever machines people bring.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
    config=_refuse_fractions,
    default_parameter=Parameter(negative="", consume_multiple=True, show_default=_shown),
)
COMMANDS: dict[str, Sequence[App | Callable[..., Any]]] = {
    "Train together": (demo, join, train, monitor, plan),
    "Model and curves": (fill, evaluate, plot, checkpoint),
    "For those who join": (ticket, doctor, first_peer, notebook, data),
    "Run by invitation": (run_key, invite, members, ban),
    "Rented machines": (aws,),
}
for number, (heading, commands) in enumerate(COMMANDS.items()):
    group = Group(heading, sort_key=number)
    for place, command in enumerate(commands):
        if isinstance(command, App):
            command.group = (group,)
            command.sort_key = place
            app.command(command)
        else:
            old_names = help_of(command.__name__.replace("_", "-"))
            app.command(command, group=group, sort_key=place, help_epilogue=old_names)
app["--help"].group = app["--version"].group = Group("Options", sort_key=len(COMMANDS))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    translation = Translation(())
    try:
        with leaving_on_signals():
            translation = Translation(arguments)
            for note in translation.notes:
                print(f"Note: {note}", file=sys.stderr)  # noqa: T201
            code = app(translation.words, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, ConfigError, JoinFailed) as error:
        _complain(translation.as_typed(_explained(error)))
        return EXIT_USAGE
    except ManyhandsError as error:
        _complain(translation.as_typed(str(error)))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of standard output has ended, as head does
        redirect_stdout_to(None)
        return EXIT_FAILED
    except OSError as error:
        _complain(f"{error.filename or 'the system'}: {error.strerror or error}")
        return EXIT_FAILED
    except (MemoryError, RuntimeError, ImportError) as error:
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in OUT_OF_MEMORY):
            raise
        _complain(
            f"out of memory ({reason_of(error)}): end other programs, or raise the limits of the shell that ulimit -a "
            "shows"
        )
        return EXIT_FAILED
    return code if isinstance(code, int) else EXIT_OK


def check_train(arguments: Sequence[str]) -> None:
    """Check a command line of ``manyhands train`` that another machine will run, without running it.

    Raises:
        ConfigError: it would be refused, or start no trainer.
    """
    words = Translation(arguments).words
    try:
        command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise ConfigError(_explained(error)) from None
    if command is not train:
        raise ConfigError("--help and --version start no trainer; leave them out")
    AlbertRecipe(**settings_given(bound.arguments.get("recipe")))


def _explained(error: Exception) -> str:
    """The message for an error, with a way to write the command line that works."""
    command = " ".join(error.command_chain or ()) if isinstance(error, CycloptsError) else ""
    if isinstance(error, UnusedCliTokensError):
        return _left_over(command, error.unused_tokens or [])
    if isinstance(error, UnknownOptionError):
        return _unknown(command, error)
    if isinstance(error, CoercionError) and error.token is not None and error.target_type in KINDS:
        option = error.token.keyword or "the argument"
        return f"{option} is {error.token.value!r}; it must be {KINDS[error.target_type]}"
    return str(error)


def _left_over(command: str, words: Sequence[str]) -> str:
    left = " ".join(words)
    if command == JOIN:
        return f"join takes one address or ticket, and {left!r} is left over; copy a ticket as one word, without breaks"
    if command in ANY and any(Ticket.is_one(word) or ":" in word or "/" in word for word in words):
        return f"{command} takes addresses after an option: write --initial-peers {left}"
    return f'{command} cannot use {left!r}; "manyhands {command} --help" shows an example'


def _unknown(command: str, error: UnknownOptionError) -> str:
    option = (error.token.keyword or error.token.value).partition("=")[0]
    name = option.lstrip("-").replace("-", "_")
    if command not in ANY or name not in ("model", *AlbertRecipe.__dataclass_fields__):
        return str(error)
    if command == JOIN:
        return f"{option} comes from the run: leave it out (manyhands train --initial-peers ADDRESS compares it)"
    return f"{option} is set by the trainers of a run: leave it out"


def _complain(message: str) -> None:
    print(f"manyhands: {message}", file=sys.stderr)  # noqa: T201
