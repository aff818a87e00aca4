"""``python -m manyhands`` is the same as ``manyhands``."""

from manyhands.cli.entry import main

main()
