"""Entry point of the ``manyhands`` command: handles Ctrl-C while the slow imports are still running."""

from __future__ import annotations

import atexit
import gc
import os
import sys

EXIT_INTERRUPTED = 130


def main(*before: str) -> None:
    """Run the command line and exit with its exit code.

    Args:
        before: the name of a command, put before the arguments of the program.
    """
    _open_closed_streams()
    atexit.register(gc.freeze)  # otherwise Python visits each object of torch and transformers at its exit, for seconds
    try:
        from manyhands.cli.main import run

        code = run([*before, *sys.argv[1:]])
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    # If a KeyboardInterrupt passes through exec() or eval() of text, as in the making of a dataclass, Python marks it
    # as unhandled, and ends the process by SIGINT at its exit. The next eval() clears that mark.
    eval("None")
    from manyhands.cli.leaving import finish

    finish(code)


def _open_closed_streams() -> None:
    """Open standard streams that the shell has closed (``>&-``) as null devices: Python and libraries need them."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        nowhere = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is that of the stream
        setattr(sys, name, open(nowhere, "w" if descriptor else "r"))  # noqa: SIM115, PTH123 (until the end)
