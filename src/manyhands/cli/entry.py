"""The ``manyhands`` command begins here, so that Ctrl-C is understood while the rest is still being imported."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130


def main(*before: str) -> None:
    """Run the command line; exits with its code.

    Args:
        before: the name of a command, which the arguments of the program follow.
    """
    try:
        from manyhands.cli.main import run

        code = run([*before, *sys.argv[1:]])
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.exit(code)
