"""The updates of the page: each has only the changes, and is encoded once for all browsers. Pure.

The picture is sent in four parts. Each part has a version, so that a browser that was too slow for some updates gets
the newest ones instead of all of them:

- ``run``: the numbers of the run; at most 4 times a second.
- ``leaders``, ``events``: whole lists; at most once a second.
- ``peers``: the changed rows; at most as often as ``run``, with 1,000 peers and more every 2 s. A browser that lacks
  the rows before gets all of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec

from manyhands.monitor.picture import LeaderboardRow, PeerRow, RunPicture

RUN_PERIOD_S = 0.25
LISTS_PERIOD_S = 1.0
MAX_PEERS_PERIOD_S = 2.0
ROWS_PER_S = 500.0
"""Most rows of the table that are compared in a second. A small table changes as often as the numbers of the run."""
LOOK_STEP_S = 5.0
"""Seconds after which the time of the last look is sent, if nothing else has changed."""
SPEED_STEP = 0.05
"""Smallest relative change of a peer's speed that is sent: measured speeds differ a little at each look."""

LISTS = ("peers", "leaders", "events")
PEER_COLUMNS = tuple(field for field in PeerRow.__struct_fields__ if field != "share")
"""The columns of a row in the stream. The page computes the share."""

_encode = msgspec.json.Encoder().encode


def message(event: str, data: Any) -> bytes:
    """A server-sent event with JSON data."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), _encode(data))


def head_of(picture: RunPicture) -> dict[str, Any]:
    """The picture without its lists."""
    return {name: getattr(picture, name) for name in picture.__struct_fields__ if name not in LISTS}


class Part(ABC):
    """A part of the picture.

    Args:
        period_s: shortest time between two versions.
    Attributes:
        version: 0 before the first.
    """

    def __init__(self, period_s: float) -> None:
        self.version = 0
        self._period_s = period_s
        self._due_at = -math.inf
        self._compared: RunPicture | None = None

    def update(self, picture: RunPicture, now: float) -> bool:
        """Make a new version if there is news, and it is time for it; returns whether there is one."""
        if now < self._due_at or picture is self._compared:
            return False
        self._compared = picture
        if not self._take(picture):
            return False
        self.version += 1
        self._due_at = now + self._period_s
        return True

    @abstractmethod
    def _take(self, picture: RunPicture) -> bool:
        """Take over the changes in a picture; returns whether there are any."""

    @abstractmethod
    def since(self, version: int) -> bytes:
        """The update for a browser that has this version; empty if it has the newest one."""


class WholePart(Part):
    """A part that is sent whole.

    Args:
        content: takes it out of a picture.
        key: two contents with equal keys are the same news; by default the content itself.
    """

    def __init__(
        self, name: str, content: Callable[[RunPicture], Any], period_s: float, key: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(period_s)
        self._name = name
        self._content = content
        self._key = key
        self._sent: Any = None
        self._message = b""

    def _take(self, picture: RunPicture) -> bool:
        content = self._content(picture)
        key = self._key(content) if self._key is not None else content
        if self.version and key == self._sent:
            return False
        self._sent = key
        self._message = message(self._name, content)
        return True

    def since(self, version: int) -> bytes:
        return self._message if version != self.version else b""


class PeersPart(Part):
    """The table of peers, of which only changed rows are sent.

    A message is ``{"whole": bool, "columns": [...], "rows": [[...], ...], "gone": [peer_id, ...]}``; rows are in no
    order.
    """

    def __init__(self) -> None:
        super().__init__(RUN_PERIOD_S)
        self._rows: dict[str, PeerRow] = {}  # as sent
        self._changes = b""
        self._whole = b""  # made when asked for

    def _take(self, picture: RunPicture) -> bool:
        rows = {row.peer_id: row for row in picture.peers}
        sent = self._rows
        self._period_s = min(max(len(rows) / ROWS_PER_S, RUN_PERIOD_S), MAX_PEERS_PERIOD_S)
        news = {
            peer_id: row
            for peer_id, row in rows.items()
            if (before := sent.get(peer_id)) is not row and (before is None or _is_news(before, row))
        }
        gone = [peer_id for peer_id in sent if peer_id not in rows]
        if self.version and not news and not gone:
            return False
        for peer_id in gone:
            del sent[peer_id]
        sent |= news
        self._changes = self._message(news, gone, is_whole=False)
        self._whole = b""
        return True

    def since(self, version: int) -> bytes:
        if version == self.version:
            return b""
        if version and version == self.version - 1:
            return self._changes
        self._whole = self._whole or self._message(self._rows, [], is_whole=True)
        return self._whole

    @staticmethod
    def _message(rows: dict[str, PeerRow], gone: list[str], *, is_whole: bool) -> bytes:
        return message(
            "peers",
            {
                "whole": is_whole,
                "columns": PEER_COLUMNS,
                "rows": list(map(_cells, rows.values())),
                "gone": gone,
            },
        )


_cells = attrgetter(*PEER_COLUMNS)
_strict = attrgetter(*(column for column in PEER_COLUMNS if column not in ("last_seen", "samples_per_second")))


def _is_news(before: PeerRow, row: PeerRow) -> bool:
    """Whether a row differs in more than ``last_seen`` and a small change of speed."""
    speed = row.samples_per_second
    old_speed = before.samples_per_second
    if abs(speed - old_speed) > SPEED_STEP * max(speed, old_speed):
        return True
    return bool(_strict(before) != _strict(row))


def parts_of() -> list[Part]:
    """The parts of the stream, in the order in which a browser gets them."""
    return [
        WholePart("run", head_of, RUN_PERIOD_S, _run_key),
        PeersPart(),
        WholePart("leaders", _short_leaders, LISTS_PERIOD_S),
        WholePart("events", lambda picture: picture.events, LISTS_PERIOD_S),
    ]


def _short_leaders(picture: RunPicture) -> list[LeaderboardRow]:
    """The leaderboard with one peer of each name: a name may have hundreds."""
    return [msgspec.structs.replace(leader, peer_ids=leader.peer_ids[:1]) for leader in picture.leaders]


def _run_key(head: dict[str, Any]) -> Any:
    """The numbers with a rounded time: the time alone is sent only every :data:`LOOK_STEP_S`."""
    eta_s = head["eta_s"]
    due = None if eta_s is None else round(head["time"] + eta_s)
    return {**head, "eta_s": due, "time": head["time"] // LOOK_STEP_S}
