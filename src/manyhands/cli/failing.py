"""The error of a command that could not do all that it was asked."""

from __future__ import annotations

from manyhands.base.errors import ManyhandsError


class CommandFailed(ManyhandsError):
    """A command ended early, or did only a part of its work. The message says what is missing."""
