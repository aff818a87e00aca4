"""The history of a run in an SQLite file: points of the curves, credited steps, peers and events.

New entries are kept in memory, and a thread of its own writes them once a second in one transaction. While the disk is
full, or another program locks the file, they stay in memory; reads show both. So a failing disk never ends a monitor.

Size: about 120 bytes for a point, 12 for each contributor to a step, and 150 for an event. A step every 30 s by 20
peers makes 1 MB a day. The lists of steps have at most 50 MB together, and events 4 MB, however long the run is.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from manyhands.base.errors import ConfigError
from manyhands.base.text import reason_of
from manyhands.monitor.credit import Changes, CreditedStep, Total
from manyhands.monitor.picture import Point, RunEvent
from manyhands.optim.metrics import Unit, unpacked

K = TypeVar("K")
V = TypeVar("V")
logger = logging.getLogger(__name__)

SCHEMA = 2
WRITE_PERIOD_S = 1.0
RETRY_PERIOD_S = 10.0
BUSY_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 1.5
MAX_EVENTS = 20_000
MAX_UNWRITTEN = 100_000
"""Most entries of each kind that are kept while the file cannot be written; beyond it, the oldest are lost."""

_TABLES = """
CREATE TABLE meta (run_id TEXT NOT NULL, unit TEXT NOT NULL);
CREATE TABLE points (
    step INTEGER PRIMARY KEY, time REAL NOT NULL, loss REAL, heldout_loss REAL, samples INTEGER NOT NULL,
    samples_per_second REAL NOT NULL, peers INTEGER NOT NULL, learning_rate REAL, bytes_sent INTEGER);
CREATE INDEX points_by_time ON points (time);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, after BLOB NOT NULL, num_signers INTEGER NOT NULL, shares BLOB NOT NULL);
CREATE TABLE settled (peer BLOB PRIMARY KEY, samples INTEGER NOT NULL, rounds INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE peers (
    peer BLOB PRIMARY KEY, peer_id TEXT NOT NULL, name TEXT NOT NULL, since REAL NOT NULL, since_step INTEGER NOT NULL,
    began_at REAL NOT NULL, last_seen REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL, step INTEGER NOT NULL,
    peer_id TEXT NOT NULL, name TEXT NOT NULL);
CREATE INDEX events_by_time ON events (time);
"""
_POINT = "step, time, loss, heldout_loss, samples, samples_per_second, peers, learning_rate, bytes_sent"
_EVENT = "time, kind, text, step, peer_id, name"


class SeenPeer(msgspec.Struct, frozen=True):
    """A peer that has been seen.

    Attributes:
        peer: its short id.
        since, since_step: time (seconds since 1970) and global step of the run at which its session began.
        began_at: start of its process, as the peer reports it; another value is another session.
    """

    peer: bytes
    peer_id: str
    name: str
    since: float
    since_step: int
    began_at: float
    last_seen: float


class History:
    """The history of one run. All methods may be called from any thread; those that read wait for the disk.

    Args:
        path: of the file, created if missing; None keeps all in memory.
    Raises:
        ConfigError: the file is of another run or of another version, or cannot be used.
    """

    def __init__(self, run_id: str, path: Path | None = None) -> None:
        self._run_id = run_id
        self._where = str(path) if path is not None else "memory"
        self._using = threading.Lock()  # guards the connection
        self._changing = threading.Lock()  # guards the entries that are not written yet
        self._new = _Unwritten()
        self._has_failed = False
        try:
            self._connection = self._opened(path)
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"the history in {self._where} cannot be used: {reason_of(error)}; move the file away, or name another "
                "--state-dir"
            ) from error
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._write_forever, name="history", daemon=True)
        self._thread.start()

    def _opened(self, path: Path | None) -> sqlite3.Connection:
        connection = sqlite3.connect(
            path if path is not None else ":memory:", timeout=BUSY_TIMEOUT_S, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, SCHEMA):
                raise ConfigError(
                    f"the history in {path} was written by another version of manyhands; use that one, or name another "
                    "--state-dir"
                )
            if version == 0:
                with connection:
                    connection.executescript(f"BEGIN; {_TABLES}")
                    connection.execute("INSERT INTO meta VALUES (?, 'samples')", (self._run_id,))
                    connection.execute(f"PRAGMA user_version={SCHEMA}")
            (run_id,) = connection.execute("SELECT run_id FROM meta").fetchone()
            if run_id != self._run_id:
                raise ConfigError(
                    f"the history in {path} is of run {run_id!r}, and this is run {self._run_id!r}; name another "
                    "--state-dir"
                )
        except BaseException:
            connection.close()
            raise
        return connection

    # read

    def points(self, since: float = 0.0, limit: int = 2000) -> list[Point]:
        """Points of the curves, by step: at most ``limit``, evenly chosen, with the last one.

        Args:
            since: seconds since 1970.
        """
        limit = max(limit, 1)
        with self._using:
            with self._changing:
                unwritten = [point for point in self._new.points.values() if point.time >= since]
            rows = self._connection.execute(
                f"SELECT {_POINT} FROM points WHERE time >= ? ORDER BY time LIMIT ?", (since, limit + 1)
            ).fetchall()
            if len(rows) > limit:
                rows = self._chosen_rows(rows[0][0], since, max(limit - len(unwritten), limit // 2, 1))
        found = {row[0]: _point(row) for row in rows} | {point.step: point for point in unwritten}
        ordered = [found[step] for step in sorted(found)]
        stride = max(_quotient_rounded_up(len(ordered), limit), 1)
        return ordered[(len(ordered) - 1) % stride :: stride]

    def _chosen_rows(self, first_step: int, since: float, limit: int) -> list[tuple[Any, ...]]:
        """The last row of each of ``limit`` ranges of steps; a scan of all rows takes a second after a year."""
        (last,) = self._connection.execute("SELECT max(step) FROM points").fetchone()
        stride = max(_quotient_rounded_up(last - first_step + 1, limit), 1)
        columns = ", ".join(f"points.{name}" for name in _POINT.split(", "))
        return self._connection.execute(
            "WITH RECURSIVE ends(step) AS (SELECT ? UNION ALL SELECT step - ? FROM ends WHERE step - ? >= ?) "
            f"SELECT {columns} FROM ends JOIN points ON points.step = "
            "(SELECT max(step) FROM points WHERE step <= ends.step AND step > ends.step - ?) WHERE time >= ?",
            (last, stride, stride, first_step, stride, since),
        ).fetchall()

    def points_before(self, step: int, limit: int) -> list[Point]:
        """The last ``limit`` written points below a step, in order."""
        with self._using:
            rows = self._connection.execute(
                f"SELECT {_POINT} FROM points WHERE step < ? ORDER BY step DESC LIMIT ?", (step, limit)
            ).fetchall()
        return [_point(row) for row in reversed(rows)]

    def points_after(self, step: int, since: float, limit: int) -> list[Point]:
        """The first ``limit`` points above a step and since a time (seconds since 1970), in order."""
        with self._using:
            with self._changing:
                unwritten = {
                    number: point for number, point in self._new.points.items() if number > step and point.time >= since
                }
            rows = self._connection.execute(
                f"SELECT {_POINT} FROM points WHERE step > ? AND +time >= ? ORDER BY step LIMIT ?", (step, since, limit)
            ).fetchall()
        found = {row[0]: _point(row) for row in rows} | unwritten
        return [found[number] for number in sorted(found)[:limit]]

    def events(self, limit: int = 50, before: float = 1e12) -> list[RunEvent]:
        """The last events before a time, the newest first."""
        with self._using:
            with self._changing:
                unwritten = [event for event in reversed(self._new.events) if event.time < before][:limit]
            rows = self._connection.execute(
                f"SELECT {_EVENT} FROM events WHERE time < ? ORDER BY time DESC, id DESC LIMIT ?", (before, limit)
            ).fetchall()
        stored = [RunEvent(**dict(zip(_EVENT.split(", "), row, strict=True))) for row in rows]
        return sorted([*unwritten, *stored], key=lambda event: -event.time)[:limit]

    def steps(self, before: int | None = None, limit: int | None = None) -> list[CreditedStep]:
        """The written credited steps that are not final, the newest first.

        Args:
            before: only those below this step.
        """
        with self._using:
            rows = self._connection.execute(
                "SELECT step, after, num_signers, shares FROM steps WHERE step < ? ORDER BY step DESC LIMIT ?",
                (2**62 if before is None else before, -1 if limit is None else limit),
            ).fetchall()
        return [CreditedStep(*row) for row in rows]

    def settled(self) -> dict[bytes, Total]:
        """The written totals of the steps that are final, by short id."""
        with self._using:
            rows = self._connection.execute("SELECT peer, samples, rounds FROM settled").fetchall()
        return {peer: Total(samples, rounds) for peer, samples, rounds in rows}

    def read_unit(self) -> Unit:
        """The unit of the samples in credited steps, as given to the last :meth:`set_unit`."""
        with self._using:
            (unit,) = self._connection.execute("SELECT unit FROM meta").fetchone()
        return self._new.unit or msgspec.convert(unit, Unit)

    def peers(self) -> dict[bytes, SeenPeer]:
        """All peers that have been seen, by short id."""
        with self._using:
            rows = self._connection.execute(
                "SELECT peer, peer_id, name, since, since_step, began_at, last_seen FROM peers"
            ).fetchall()
            with self._changing:
                unwritten = dict(self._new.peers)
        found = {row[0]: SeenPeer(*row) for row in rows} | unwritten
        return {peer: known for peer, known in found.items() if known is not None}

    # write

    def add_points(self, points: Iterable[Point]) -> None:
        """Write points in the place of those of the same steps."""
        with self._changing:
            self._new.points.update({point.step: point for point in points})

    def add_missing_points(self, points: Iterable[Point]) -> None:
        """Write points of steps that have none, at once; they are lost if the file cannot be written now."""
        self.flush()
        with self._using:
            try:
                with self._connection:
                    _insert_points(self._connection, "IGNORE", points)
            except sqlite3.Error as error:
                self._failed(error)

    def remove_points_after(self, step: int) -> None:
        """Forget the points after a step, to which the run has gone back."""
        with self._changing:
            self._new.points = {number: point for number, point in self._new.points.items() if number <= step}
            self._new.points_until = step if self._new.points_until is None else min(step, self._new.points_until)

    def add_credit(self, changes: Changes) -> None:
        """Write the changes of :class:`manyhands.monitor.credit.Credit`."""
        with self._changing:
            for number in changes.removed:
                self._new.steps[number] = None
            for step in changes.put:
                self._new.steps[step.step] = step
            self._new.settle(changes.settled)

    def set_unit(self, unit: Unit) -> None:
        """Write the unit of the samples in credited steps."""
        with self._changing:
            self._new.unit = unit

    def add_peers(self, peers: Iterable[SeenPeer]) -> None:
        """Write peers in the place of their earlier rows."""
        with self._changing:
            self._new.peers.update({known.peer: known for known in peers})

    def remove_peers(self, peers: Iterable[bytes]) -> None:
        """Forget peers, given by their short ids."""
        with self._changing:
            self._new.peers.update(dict.fromkeys(peers))

    def add_events(self, events: Iterable[RunEvent]) -> None:
        """Write events."""
        with self._changing:
            self._new.events.extend(events)
            del self._new.events[:-MAX_UNWRITTEN]

    def flush(self) -> bool:
        """Write the new entries; returns whether the file could be written."""
        with self._using:
            with self._changing:
                writing, self._new = self._new, _Unwritten()
            if writing.is_empty:
                return True
            try:
                with self._connection:
                    writing.write(self._connection)
            except sqlite3.Error as error:
                with self._changing:
                    self._new = writing.followed_by(self._new)
                self._failed(error)
                return False
        if self._has_failed:
            self._has_failed = False
            logger.info("The history is written to %s again", self._where)
        return True

    def _failed(self, error: sqlite3.Error) -> None:
        if not self._has_failed:
            logger.warning(
                "The history cannot be written to %s (%s); it is kept in memory until it can", self._where,
                reason_of(error),
            )  # fmt: skip
        self._has_failed = True

    def _write_forever(self) -> None:
        while not self._ending.wait(RETRY_PERIOD_S if self._has_failed else WRITE_PERIOD_S):
            try:
                self.flush()
            except Exception:
                logger.exception("A part of the history could not be written, and is lost")

    def close(self) -> None:
        """Write the rest and close the file. May be called twice."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        self.flush()
        with self._using:
            self._connection.close()


class _Unwritten:
    """The rows that are not written yet, each in its newest version."""

    def __init__(self) -> None:
        self.points: dict[int, Point] = {}
        self.points_until: int | None = None  # later ones are deleted first
        self.unit: Unit | None = None
        self.steps: dict[int, CreditedStep | None] = {}
        self.settled: dict[bytes, Total] = {}  # added to the totals in the file
        self.settled_until = -1  # this step and those before it are in the totals, and are deleted
        self.peers: dict[bytes, SeenPeer | None] = {}  # None: to be deleted
        self.events: list[RunEvent] = []

    @property
    def is_empty(self) -> bool:
        parts = (self.unit, self.points, self.steps, self.settled, self.peers, self.events)
        return self.points_until is None and not any(parts)

    def settle(self, steps: Iterable[CreditedStep]) -> None:
        """Add final steps to the totals."""
        until = -1
        for step in steps:
            self._add_totals({peer: Total(samples, 1) for peer, samples in unpacked(step.shares).items()})
            until = max(until, step.step)
        self._settle_until(until)

    def _add_totals(self, totals: Mapping[bytes, Total]) -> None:
        for peer, more in totals.items():
            before = self.settled.get(peer, Total(0, 0))
            self.settled[peer] = Total(before.samples + more.samples, before.rounds + more.rounds)

    def _settle_until(self, until: int) -> None:
        if until <= self.settled_until:
            return
        self.settled_until = until
        self.steps = {number: step for number, step in self.steps.items() if number > until}

    def followed_by(self, later: _Unwritten) -> _Unwritten:
        """Add later rows to these, and return these."""
        if later.points_until is not None:
            until = later.points_until
            self.points = {step: point for step, point in self.points.items() if step <= until}
            self.points_until = until if self.points_until is None else min(until, self.points_until)
        self.points = _last(self.points | later.points)
        self.unit = later.unit or self.unit
        self.steps = _last(self.steps | later.steps)
        self._add_totals(later.settled)
        self._settle_until(later.settled_until)
        self.peers = _last(self.peers | later.peers)
        self.events = [*self.events, *later.events][-MAX_UNWRITTEN:]
        return self

    def write(self, connection: sqlite3.Connection) -> None:
        if self.points_until is not None:
            connection.execute("DELETE FROM points WHERE step > ?", (self.points_until,))
        if self.unit is not None:
            connection.execute("UPDATE meta SET unit = ?", (self.unit,))
        _insert_points(connection, "REPLACE", self.points.values())
        gone = [(number,) for number, step in self.steps.items() if step is None]
        connection.executemany("DELETE FROM steps WHERE step = ?", gone)
        connection.execute("DELETE FROM steps WHERE step <= ?", (self.settled_until,))
        connection.executemany(
            "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?)",
            [msgspec.structs.astuple(step) for step in self.steps.values() if step is not None],
        )
        connection.executemany(
            "INSERT INTO settled VALUES (?, ?, ?) ON CONFLICT (peer) DO UPDATE SET "
            "samples = samples + excluded.samples, rounds = rounds + excluded.rounds",
            [(peer, *total) for peer, total in self.settled.items()],
        )
        connection.executemany(
            "INSERT OR REPLACE INTO peers VALUES (?, ?, ?, ?, ?, ?, ?)",
            [msgspec.structs.astuple(known) for known in self.peers.values() if known is not None],
        )
        forgotten = [(peer,) for peer, known in self.peers.items() if known is None]
        connection.executemany("DELETE FROM peers WHERE peer = ?", forgotten)
        if self.events:
            connection.executemany(
                f"INSERT INTO events ({_EVENT}) VALUES (?, ?, ?, ?, ?, ?)",
                [_row(event, _EVENT) for event in self.events],
            )
            connection.execute("DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?", (MAX_EVENTS,))


def open_history(run_id: str, state_dir: Path | None) -> History:
    """The history in a state dir, or in memory without one.

    Raises:
        ConfigError: the folder or the file cannot be used.
    """
    if state_dir is None:
        return History(run_id)
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"state dir {state_dir} cannot be created: {error.strerror}; name another one") from error
    return History(run_id, history_path(state_dir, run_id))


def history_path(state_dir: Path, run_id: str) -> Path:
    """The file of a run's history in the state dir of a monitor."""
    is_plain = re.fullmatch(r"[A-Za-z0-9_-]+", run_id) is not None
    name = run_id if is_plain else hashlib.sha256(run_id.encode()).hexdigest()[:16]
    return state_dir / f"history-{name}.db"


def _insert_points(connection: sqlite3.Connection, verb: Literal["REPLACE", "IGNORE"], points: Iterable[Point]) -> None:
    marks = ", ".join("?" * len(_POINT.split(", ")))
    connection.executemany(
        f"INSERT OR {verb} INTO points ({_POINT}) VALUES ({marks})", [_row(point, _POINT) for point in points]
    )


def _row(entry: Point | RunEvent, columns: str) -> tuple[object, ...]:
    return tuple(getattr(entry, name) for name in columns.split(", "))


def _point(row: Sequence[object]) -> Point:
    return Point(**dict(zip(_POINT.split(", "), row, strict=True)))  # type: ignore[arg-type]


def _quotient_rounded_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _last(rows: dict[K, V]) -> dict[K, V]:
    """The last rows, if there are too many."""
    return dict(list(rows.items())[-MAX_UNWRITTEN:])
