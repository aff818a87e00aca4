#!/usr/bin/env python
"""Make training samples, of WikiText-103 by default: the same as ``manyhands data prepare``."""

from manyhands.cli.entry import main

if __name__ == "__main__":
    main("data", "prepare")
