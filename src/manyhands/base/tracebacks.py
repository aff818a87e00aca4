"""Frees the frames that a stored exception keeps alive."""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def clear_tracebacks(error: E) -> E:
    """Remove the tracebacks of an error and of its causes, and return it.

    A traceback keeps the local variables of its frames alive, such as vectors as large as the model, and often the
    object that stores the error: a cycle that only the garbage collector frees. Use it for expected errors that
    are not raised again.
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
