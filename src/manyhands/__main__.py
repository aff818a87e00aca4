"""``python -m manyhands`` is the same as ``manyhands``."""

from manyhands.cli.main import main

main()
