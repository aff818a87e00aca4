"""Entry point of the ``manyhands`` command: handles Ctrl-C while the slow imports are still running."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130


def main(*before: str) -> None:
    """Run the command line and exit with its exit code.

    Args:
        before: the name of a command, put before the arguments of the program.
    """
    try:
        from manyhands.cli.main import run

        code = run([*before, *sys.argv[1:]])
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.exit(code)
