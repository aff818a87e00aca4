#!/usr/bin/env python
"""Measure a run on held-out text: ``manyhands evaluate``, with the option names of the tutorials too."""

from manyhands.cli.entry import main

if __name__ == "__main__":
    main("evaluate")
