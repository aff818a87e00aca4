#!/usr/bin/env python
"""Train ALBERT with this machine: ``manyhands train``, with the option names of the tutorials too."""

from manyhands.cli.entry import main

if __name__ == "__main__":
    main("train")
