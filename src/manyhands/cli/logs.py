"""Log format of the commands."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s.%(msecs)03d [%(levelname)s] %(message)s"


def log_to_stdout(*, verbose: bool) -> None:
    """Print manyhands' log lines to standard output; ``verbose`` adds debug lines and their origin."""
    fmt = FORMAT.replace("] ", "] [%(name)s:%(lineno)d] ") if verbose else FORMAT
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(fmt, datefmt="%b %d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("manyhands").setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.captureWarnings(True)
