#!/usr/bin/env python
"""Welcome peers of any run: ``manyhands first-peer``, with the option names of the tutorials too."""

from manyhands.cli.entry import main

if __name__ == "__main__":
    main("first-peer")
