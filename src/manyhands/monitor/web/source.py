"""The interface between the server of the page and the source of its data. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from manyhands.monitor.picture import LeaderboardRow, Point, RunEvent, RunPicture


class Source(Protocol):
    """The data of a run. The server calls it from threads of its own: all methods must be thread-safe.

    :meth:`picture` is called several times a second on the loop of the server, so it must return at once. The other
    methods may read a disk; each call has a worker thread.
    """

    @property
    def num_aborted(self) -> int:
        """Rounds that were aborted, since the start of the monitor."""

    def picture(self) -> RunPicture:
        """The run as it was at the last look; the same object until the next look. ``time`` is that of the look."""

    def points(self, since: float, limit: int) -> list[Point]:
        """The committed steps since a time, oldest first; thinned evenly if there are more than ``limit``.

        Args:
            since: seconds since 1970; 0 for all.
        """

    def points_after(self, step: int, since: float, limit: int) -> list[Point]:
        """The first ``limit`` committed steps above a step and since a time, in order."""

    def events(self, limit: int) -> list[RunEvent]:
        """The last events, the newest first."""

    def leader_of(self, peer_id: str) -> LeaderboardRow | None:
        """The row of the leaderboard with a peer, also beyond the rows of the picture; None for an unknown peer."""


class Guess(msgspec.Struct, frozen=True):
    """A token, and its probability as a share, 0 to 1."""

    token: str
    share: float


class Filled(msgspec.Struct, frozen=True):
    """A text with its masks filled, and the best guesses for each mask, in order."""

    text: str
    guesses: list[list[Guess]]


Fill = Callable[[str], Filled]
"""Fills the masks in a text with the current parameters; blocks for as long as the model computes.

Raises:
    ConfigError: the text or the model cannot be used; the message is shown on the page.
"""


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` of the points, evenly spread, with the newest one.

    Each of them gets the last held-out loss of the points that it stands for.

    Args:
        points: oldest first.
        limit: at least 1.
    """
    if len(points) <= limit:
        return list(points)
    kept = []
    for number in range(limit):
        group = points[len(points) * number // limit : len(points) * (number + 1) // limit]
        heldout = next((point.heldout_loss for point in reversed(group) if point.heldout_loss is not None), None)
        last = group[-1]
        kept.append(last if heldout == last.heldout_loss else msgspec.structs.replace(last, heldout_loss=heldout))
    return kept
