"""The error of a command that could not do all that it was asked."""

from __future__ import annotations

from manyhands.base.errors import ManyhandsError


class CommandFailed(ManyhandsError):
    """A command has not reached its end, or not with all that was asked; the message says what is missing."""
