"""Pieces of a stream that are not all there when the first of them move."""

from __future__ import annotations

from collections.abc import Callable, Iterator

Condition = Callable[[], bool]


class Pausing(Iterator[memoryview]):
    """Ends where its source gives a condition instead of a piece, and goes on there when it is asked again.

    So no thread waits for the next piece: it ends, and the loop waits until the condition holds.

    Args:
        source: gives pieces and conditions.
        begins_when: the first condition.

    Attributes:
        goes_on_when: the condition at which it ended.
        is_over: whether the source has ended.
    """

    def __init__(self, source: Iterator[memoryview | Condition], begins_when: Condition = lambda: True) -> None:
        self.goes_on_when = begins_when
        self.is_over = False
        self._source = source

    def __next__(self) -> memoryview:
        try:
            piece = next(self._source)
        except StopIteration:
            self.is_over = True
            raise
        if isinstance(piece, memoryview):
            return piece
        self.goes_on_when = piece
        raise StopIteration
