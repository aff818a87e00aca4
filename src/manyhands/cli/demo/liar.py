"""A trainer of the demo that lies: ``python -m manyhands.cli.demo.liar mean-flip train ...``."""

from __future__ import annotations

import sys

from manyhands.cli.entry import main
from manyhands.testing.lies import LIES

if __name__ == "__main__":
    LIES[sys.argv.pop(1)]()
    main()
