#!/usr/bin/env python
"""Welcome trainers and draw the curves of a run: ``manyhands monitor``, with the option names of the tutorials too."""

from manyhands.cli.entry import main

if __name__ == "__main__":
    main("monitor")
