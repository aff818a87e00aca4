"""The command line: ``manyhands join | train | monitor | first-peer | ticket | run | invite | aws | doctor | demo``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, RepeatArgumentError

from manyhands.base.errors import ConfigError, JoinFailed, ManyhandsError
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
from manyhands.cli.old_names import Translation, help_of
from manyhands.cli.plot_command import plot
from manyhands.cli.run_command import run_key
from manyhands.cli.ticket_command import ticket
from manyhands.cli.train_command import settings_given, train
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.version import __version__

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

app = App(
    name="manyhands",
    help="Train one neural network together, over the internet, on whatever machines people bring.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative="", consume_multiple=True),
)
for command in (join, train, evaluate, fill, monitor, first_peer, ticket, invite, ban, members, doctor, demo):
    app.command(command, help_epilogue=help_of(command.__name__.replace("_", "-")))
app.command(data)
app.command(checkpoint)
app.command(run_key)
app.command(notebook)
app.command(plot)
app.command(aws)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    try:
        with leaving_on_signals():
            translation = Translation(arguments)
            for note in translation.notes:
                _complain(note)
            code = app(
                [_with_dashes(word) for word in translation.words],
                exit_on_error=False,
                print_error=False,
                result_action="return_value",
            )
    except (CycloptsError, ConfigError, JoinFailed) as error:
        _complain(_reason_of(error))
        return EXIT_USAGE
    except ManyhandsError as error:
        _complain(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        _complain(f"{error.filename or 'the system'}: {error.strerror or error}")
        return EXIT_FAILED
    return code if isinstance(code, int) else EXIT_OK


def check_train(arguments: Sequence[str]) -> None:
    """Read a command line of ``manyhands train`` that another machine will run; runs nothing.

    Raises:
        ConfigError: it would be refused, or start no trainer.
    """
    words = [_with_dashes(word) for word in Translation(arguments).words]
    try:
        command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise ConfigError(_reason_of(error)) from None
    if command is not train:
        raise ConfigError("--help and --version start no trainer; leave them out")
    AlbertRecipe(**settings_given(bound.arguments.get("recipe")))


def _with_dashes(argument: str) -> str:
    """Allow underscores in options, as in the tutorials of other libraries."""
    name, separator, value = argument.partition("=")
    return name.replace("_", "-") + separator + value if name.startswith("--") else argument


def _reason_of(error: Exception) -> str:
    if isinstance(error, MissingArgumentError):
        return _missing(error)
    if isinstance(error, RepeatArgumentError) and error.token.keyword is not None:
        option = "--" + error.token.keyword.removeprefix("--no-").removeprefix("--")
        both = {option, option.replace("--", "--no-", 1)}
        if both <= set(error.root_input_tokens or ()):
            return f"{' and '.join(sorted(both))} contradict each other; leave one out"
    return str(error)


def _missing(error: MissingArgumentError) -> str:
    """What to add to a command line that lacks an argument, or the value of an option."""
    assert error.argument is not None
    name, command = error.argument.name, " ".join(error.command_chain or ())
    is_positional = error.argument.index is not None and error.keyword is None
    needed = name.lstrip("-").upper() if is_positional else f"{error.keyword or name} VALUE"
    return f'{command} needs {needed}; "manyhands {command} --help" shows an example'


def _complain(message: str) -> None:
    print(f"manyhands: {message}", file=sys.stderr)  # noqa: T201
