#!/usr/bin/env python
"""Measure how well the model of a run does: ``manyhands evaluate``, with the names of the tutorials too."""

from manyhands.cli.entry import main

if __name__ == "__main__":
    main("evaluate")
