"""The command line: ``manyhands join | train | monitor | first-peer | ticket | run | invite | aws | doctor | demo``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, get_args

from cyclopts import App, CycloptsError, Group, MissingArgumentError, Parameter, RepeatArgumentError
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
from manyhands.cli.plot_command import plot
from manyhands.cli.run_command import run_key
from manyhands.cli.ticket_command import ticket
from manyhands.cli.train_command import settings_given, train
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.version import __version__

NUMBERS: dict[type | None, str] = {int: "a whole number, for example 4", float: "a number, for example 0.5"}
OUT_OF_MEMORY = ("allocate memory", "failed to map segment", "start new thread")
"""In errors of torch, of the loader of libraries, and of Python's threads."""
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def _shown(default: object) -> str | None:
    """A default value, as it would be written; None for nothing."""
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or None
    return str(default) if default is not None else None


app = App(
    name="manyhands",
    help="Train one neural network together, over the internet, on whatever machines people bring.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative="", consume_multiple=True, show_default=_shown),
)
COMMANDS: dict[str, Sequence[App | Callable[..., Any]]] = {
    "Train together": (demo, join, train, monitor),
    "Model and curves": (fill, evaluate, plot, checkpoint),
    "For those who join": (ticket, doctor, first_peer, notebook, data),
    "Run by invitation": (run_key, invite, members, ban),
    "Rented machines": (aws,),
}
for number, (heading, commands) in enumerate(COMMANDS.items()):
    group = Group(heading, sort_key=number)
    for place, command in enumerate(commands):
        if isinstance(command, App):
            command.group, command.sort_key = (group,), place
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
            code = app(
                _checked(translation.words),
                exit_on_error=False,
                print_error=False,
                result_action="return_value",
            )
    except (CycloptsError, ConfigError, JoinFailed) as error:
        _complain(translation.as_typed(_explained(error)))
        return EXIT_USAGE
    except ManyhandsError as error:
        _complain(translation.as_typed(str(error)))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # by a reader that wants no more, such as head
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
    """Read a command line of ``manyhands train`` that another machine will run; runs nothing.

    Raises:
        ConfigError: it would be refused, or start no trainer.
    """
    words = _checked(Translation(arguments).words)
    try:
        command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise ConfigError(_explained(error)) from None
    if command is not train:
        raise ConfigError("--help and --version start no trainer; leave them out")
    AlbertRecipe(**settings_given(bound.arguments.get("recipe")))


def _checked(words: Sequence[str]) -> list[str]:
    """The words with dashes in options. Cyclopts would round fractions where whole numbers are needed.

    Raises:
        ConfigError: there is such a fraction.
    """
    words = [_with_dashes(word) for word in words]
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    fractions = {option: value for option, value in pairwise(parts) if _is_fraction(value)}
    command = app.parse_commands(words)[1][-1]
    if fractions and command.default_command is not None:
        for argument in command.assemble_argument_collection():
            for option in fractions.keys() & set(argument.names):
                if int in (argument.hint, *get_args(argument.hint)):
                    raise ConfigError(f"{option} is {fractions[option]!r}; it must be {NUMBERS[int]}")
    return words


def _is_fraction(value: str) -> bool:
    try:
        return "." in value and float(value) % 1 != 0
    except ValueError:
        return False


def _with_dashes(argument: str) -> str:
    """Allow underscores in options, as in the tutorials of other libraries."""
    name, separator, value = argument.partition("=")
    return name.replace("_", "-") + separator + value if name.startswith("--") else argument


def _explained(error: Exception) -> str:
    """What to write instead."""
    command = " ".join(error.command_chain or ()) if isinstance(error, CycloptsError) else ""
    if isinstance(error, MissingArgumentError):
        return _missing(command, error)
    if isinstance(error, UnusedCliTokensError):
        return _left_over(command, error.unused_tokens or [])
    if isinstance(error, UnknownOptionError):
        return _unknown(command, error)
    if isinstance(error, CoercionError) and error.token is not None and error.target_type in NUMBERS:
        option = error.token.keyword or "the argument"
        return f"{option} is {error.token.value!r}; it must be {NUMBERS[error.target_type]}"
    if isinstance(error, RepeatArgumentError) and error.token.keyword is not None:
        option = "--" + error.token.keyword.removeprefix("--no-").removeprefix("--")
        both = {option, option.replace("--", "--no-", 1)}
        if both <= set(error.root_input_tokens or ()):
            return f"{' and '.join(sorted(both))} contradict each other; leave one out"
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


def _missing(command: str, error: MissingArgumentError) -> str:
    """What to add to a command line that lacks an argument, or the value of an option."""
    assert error.argument is not None
    name = error.argument.name
    is_positional = error.argument.index is not None and error.keyword is None
    needed = name.lstrip("-").upper() if is_positional else f"{error.keyword or name} VALUE"
    return f'{command} needs {needed}; "manyhands {command} --help" shows an example'


def _complain(message: str) -> None:
    print(f"manyhands: {message}", file=sys.stderr)  # noqa: T201
