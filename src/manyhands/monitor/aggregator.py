"""Builds the picture of a run, and its history, from what its peers publish: one look at a time.

Pure, except that it hands new entries to the history, which writes them later.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from manyhands.averaging.peer_records import SeenRecord
from manyhands.base.identity import PeerId
from manyhands.base.text import counted
from manyhands.monitor.coordinator_exchange import Told
from manyhands.monitor.credit import PATIENCE_S, Changes, Credit, leaders_of
from manyhands.monitor.history import History
from manyhands.monitor.monitor_events import Happened, StepMade
from manyhands.monitor.peer_table import PeerTable, longest_silence_s, median_of
from manyhands.monitor.picture import LeaderboardRow, Point, RunEvent, RunPicture
from manyhands.optim.metrics import AccountRecord, unpacked
from manyhands.optim.run.progress import MAX_COUNT, MAX_SPEED, Progress

MAX_EVENTS = 50
MAX_LEADERS = 100
MAX_OPEN_POINTS = 64
"""Number of points of the last steps that later looks may still change."""
REFUSED_PERIOD_S = 60.0
"""Shortest time in seconds between two events about refused records."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The records that a monitor has read at one moment.

    Attributes:
        observed: the valid progress records.
        accounts: the last account of each peer, also of strangers.
        trained_lately: the peers that trained lately. Only their accounts count.
        step: of the run.
        progress: towards the next step; None while no peer trains.
        num_refused: number of records that were refused so far because they broke a rule.
        now: loop time; ``wall_time`` is the same instant in seconds since 1970.
    """

    observed: Mapping[PeerId, SeenRecord]
    accounts: Mapping[PeerId, AccountRecord]
    trained_lately: Container[PeerId]
    step: int
    progress: Progress | None
    target_batch_size: int
    num_refused: int
    now: float
    wall_time: float


class Aggregator:
    """Aggregates the looks at one run.

    Attributes:
        all_leaders: the whole leaderboard of the last picture; replaced, never changed.
        made: steps whose metrics became complete since the last picture.
        heldout: held-out losses that were read since the last picture, by step.
        told: histories that other monitors sent since the last picture.
        first_step: the first step that was seen since the start; 0 before it.
        silence_due_s: seconds from the last look until the first peer counts as gone, if it stays silent.
    """

    def __init__(self, run_id: str, history: History) -> None:
        self._run_id = run_id
        self._history = history
        self._credit = Credit(history.steps(), history.settled())
        self._table = PeerTable(history.peers())
        self._events: deque[RunEvent] = deque(history.events(MAX_EVENTS)[::-1], maxlen=MAX_EVENTS)
        self._known_until = self._events[-1].time if self._events else 0.0
        self._points = {point.step: point for point in history.points(limit=1)}
        self.all_leaders: list[LeaderboardRow] = []
        self._leaders_of = (-1, -1)  # versions of the credit and of the table that the leaderboard is made of
        self._unit = history.read_unit()
        self._behind = 0  # step from which the run has gone back
        self._behind_since = math.inf
        self._num_refused = 0
        self._told_refused_at = -math.inf
        self._news: list[RunEvent] = []
        self.made: list[StepMade] = []
        self.heldout: dict[int, float] = {}
        self.told: list[Told] = []
        self.began_at = math.inf
        self._first_step: int | None = None  # of the history; None until it is looked up
        self._first_time: float | None = None  # of that step, unless it is the first of the run
        self.first_step = 0
        self.silence_due_s = math.inf

    def restarted(self, before: int, after: int, wall_time: float) -> None:
        """Note that the run was begun anew, or resumed from a checkpoint. Later points go if it stays behind them."""
        text = f"the run has gone back from step {before} to step {after}"
        self._news.append(RunEvent(time=wall_time, kind="restarted", text=text, step=after))
        self._points = {step: point for step, point in self._points.items() if step <= after}
        self._behind = max(self._behind, before)

    def _remove_later_points(self, look: Look) -> None:
        """Remove the points of steps that the run no longer has, after the same time as their credit."""
        if look.step >= self._behind:
            self._behind = 0
            self._behind_since = math.inf
            return
        self._behind_since = min(self._behind_since, look.now)
        if look.now - self._behind_since >= PATIENCE_S:
            self._history.remove_points_after(look.step)
            self._behind = 0
            self._behind_since = math.inf

    def _add_told(self, told: Told) -> None:
        """Fill gaps with the history of another monitor. The events come from the first monitor that has any."""
        self._history.add_missing_points(told.points)
        self._first_step = None  # it may begin earlier now
        missed = [event for event in told.events if event.time > self._known_until]  # others are in the history already
        self._history.add_events(missed)
        if told.events:
            self._known_until = math.inf
        self._history.add_credit(self._credit.add_told(told.steps))
        self._history.add_peers(self._table.learn({peer.peer_id: peer.name for peer in told.peers}))

    def add(self, look: Look) -> tuple[RunPicture, list[Happened]]:
        """Add a look; returns the picture after it, and what has happened since the last one."""
        self.began_at = min(self.began_at, look.wall_time)
        credit = self._credit
        trained = look.trained_lately
        accounts = {peer_id: account for peer_id, account in look.accounts.items() if peer_id in trained}
        positions = {
            peer_id: seen.record.position
            for peer_id, seen in look.observed.items()
            if not seen.record.is_auxiliary and look.now - seen.since <= longest_silence_s(seen.record)
        }
        self._note_unit(accounts.values())
        changes = credit.look(accounts, positions, look.now)
        while self.told:  # more may be appended meanwhile
            self._add_told(self.told.pop(0))
        events, known = self._table.look(
            look.observed, look.accounts, now=look.now, wall_time=look.wall_time, step=look.step, credit=credit
        )
        earlier = {
            peer_id: account.name
            for peer_id, account in look.accounts.items()
            if peer_id not in trained and credit.total_of(peer_id).samples > 0
        }
        known += self._table.learn(earlier)
        self._note_refused(look)
        self._news += events
        events, self._news = self._news, []
        self._events.extend(events)
        self._history.add_credit(changes)
        self._history.add_peers(known)
        self._history.remove_peers(self._table.forget(credit))
        self._history.add_events(events)
        self._remove_later_points(look)
        points = self._changed_points(look, accounts, changes)
        self._history.add_points(points)
        if self.first_step == 0 and points:
            self.first_step = min(point.step for point in points)
        if points and self._first_step is None:
            self._note_first_point()
        self.silence_due_s = self._table.silence_due_s(look.now)
        return self._picture(look), [
            Happened(event.kind, event.text, event.step, event.peer_id, event.name) for event in events
        ]

    def _note_first_point(self) -> None:
        """Note the first step of the history, and its time."""
        first = next(iter(self._history.points_after(0, since=0.0, limit=1)), None)
        self._first_step = first.step if first is not None else None
        self._first_time = first.time if first is not None and first.step > 1 else None

    def _note_refused(self, look: Look) -> None:
        more = look.num_refused - self._num_refused
        if more > 0 and look.now >= self._told_refused_at + REFUSED_PERIOD_S:
            self._num_refused = look.num_refused
            self._told_refused_at = look.now
            verb = "was" if more == 1 else "were"
            text = f"{counted(more, 'invalid record')} of other peers {verb} refused"
            self._news.append(RunEvent(time=look.wall_time, kind="refused", text=text, step=look.step))

    def _note_unit(self, accounts: Iterable[AccountRecord]) -> None:
        """Note the unit of weights that most peers report. A peer that has made no batch reports none."""
        if said := Counter(account.unit for account in accounts if account.unit is not None):
            ((unit, _),) = said.most_common(1)
            if unit != self._unit:
                self._unit = unit
                self._history.set_unit(unit)

    def _changed_points(self, look: Look, accounts: Mapping[PeerId, AccountRecord], changes: Changes) -> list[Point]:
        changed: dict[int, Point] = {}

        def point_of(step: int) -> Point:
            return changed.get(step) or self._points.get(step) or Point(time=look.wall_time, step=step)

        for made in self.made:
            said = [account for account in accounts.values() if account.step == made.step]
            bytes_sent = min(sum(account.bytes_sent for account in said), MAX_COUNT) if said else None
            before = point_of(made.step)
            changed[made.step] = msgspec.structs.replace(
                before,
                loss=made.loss if math.isfinite(made.loss) else None,
                samples=before.samples or (min(made.samples, MAX_COUNT) if self._unit == "samples" else 0),
                samples_per_second=min(made.samples_per_second, MAX_SPEED),
                peers=made.alive_peers,
                learning_rate=median_of(said, lambda account: account.learning_rate),
                bytes_sent=bytes_sent,
            )
        for credited in changes.put:
            shares = unpacked(credited.shares)
            before = point_of(credited.step)
            changed[credited.step] = msgspec.structs.replace(
                before, samples=sum(shares.values()), peers=max(before.peers, len(shares))
            )
        for step, loss in self.heldout.items():
            changed[step] = msgspec.structs.replace(point_of(step), heldout_loss=loss)
        self.made = []
        self.heldout = {}
        self._points |= changed
        for step in sorted(self._points)[:-MAX_OPEN_POINTS]:
            del self._points[step]
        return list(changed.values())

    def _picture(self, look: Look) -> RunPicture:
        progress = look.progress
        credit = self._credit
        eta_s = progress.eta_s if progress is not None else math.inf
        is_averaging = progress is not None and 0 < look.target_batch_size <= progress.samples
        return RunPicture(
            run_id=self._run_id,
            time=look.wall_time,
            step=look.step,
            samples=progress.samples if progress is not None else 0,
            target_batch_size=look.target_batch_size,
            num_peers=progress.num_peers if progress is not None else 0,
            samples_per_second=progress.samples_per_second if progress is not None else 0.0,
            eta_s=eta_s if math.isfinite(eta_s) else None,
            committed_samples=credit.num_samples,
            committed_since=self._first_time,
            unit=self._unit,
            last=self._points[max(self._points)] if self._points else None,
            peers=self._table.rows(credit, is_averaging=is_averaging),
            leaders=self._current_leaders(),
            events=list(self._events)[::-1],
        )

    def _current_leaders(self) -> list[LeaderboardRow]:
        versions = (self._credit.version, self._table.version)
        if self._leaders_of != versions:
            self._leaders_of = versions
            self.all_leaders = leaders_of(self._credit.totals, self._table.names)
        return self.all_leaders[:MAX_LEADERS]
