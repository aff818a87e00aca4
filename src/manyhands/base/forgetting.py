"""Errors that are kept for their words only."""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """The same error, which no longer keeps the frames alive that it went through; nor do those that led to it.

    A frame knows what it worked on, vectors as large as the model say, and often whoever keeps the error: a cycle that
    lasts until the collector comes. For errors that are expected, and are not raised again.
    """
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            errors += [one.__cause__, one.__context__]
    return error
