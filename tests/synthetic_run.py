"""A made-up run, for the page, its benchmark and its screenshots: no network, no torch, and time as it is given."""

from __future__ import annotations

import math
import random
import threading
from collections import defaultdict
from dataclasses import dataclass

import msgspec

from manyhands.monitor.picture import LeaderboardRow, PeerRow, PeerState, Point, Reachability, RunEvent, RunPicture
from manyhands.monitor.web.source import thinned
from manyhands.optim.metrics import Unit

STEP_S = 40.0
NAMES = (
    "ada", "Grace H.", "lab-7 (Kyiv)", "tjunxx", "Maple", "Łukasz", "couch potato", "Søren", "blue-heron", "Ines",
    "midnight oil", "team Rotterdam", "quokka", "Yusuf", "old laptop", "penguin-12", "north star", "Zoë", "rack 3",
)  # fmt: skip
DEVICES = ("NVIDIA RTX 3090", "NVIDIA T4", "NVIDIA RTX 4070 Ti", "Apple M2", "CPU, 8 cores", "NVIDIA A100-SXM4-40GB")
REASONS = ("it was averaging when the target was reached", "it lost its connection to two members of its group")


@dataclass
class SyntheticPeer:
    """A peer that trains evenly."""

    row: PeerRow
    samples_s: float
    pending: float = 0.0


class SyntheticRun:
    """A run of so many peers that makes a global step every 40 s.

    It is a :class:`manyhands.monitor.web.Source`. Credits add up: the leaderboard, the peers and the points have the
    same samples in all.

    Attributes:
        num_read: points that :meth:`points_after` has given.
        unit: of what is credited.

    Args:
        now: seconds since 1970, of its last look.
        past_steps: global steps before that, for the curves.
        grows: the peers have come one by one.
    """

    def __init__(self, num_peers: int, now: float, past_steps: int = 0, *, grows: bool = False) -> None:
        self.num_aborted = 3
        self.num_read = 0
        self.unit: Unit = "samples"
        self._rng = random.Random(26)
        self._lock = threading.Lock()
        self._now = now - past_steps * STEP_S
        self._peers: list[SyntheticPeer] = []
        self._points: list[Point] = []
        self._events: list[RunEvent] = []
        self._num_made = 0
        for number in range(num_peers):
            peer = self._add_peer(None)
            if grows:
                begins = self._now + (number / num_peers) ** 2 * past_steps * STEP_S
                peer.row = msgspec.structs.replace(peer.row, since=begins)
        self._target = max(int(sum(peer.samples_s for peer in self._peers) * STEP_S), 64)
        for _ in range(past_steps):
            self._pass(STEP_S)
        self._picture = self._look()

    # what a test does to it

    def advance(self, seconds: float) -> None:
        """Let time pass, and look at the run."""
        with self._lock:
            self._pass(seconds)
            self._picture = self._look()

    def change(self, **numbers: object) -> None:
        """Replace some numbers of the picture, until time passes."""
        with self._lock:
            self._picture = msgspec.structs.replace(self._picture, **numbers)

    def add_peer(self, name: str) -> str:
        """A newcomer; returns its id."""
        with self._lock:
            peer = self._add_peer(name)
            self._tell("joined", f"{name or 'A peer'} joined.", peer.row)
            self._picture = self._look()
            return peer.row.peer_id

    def go_back(self, step: int) -> None:
        """The run is resumed from an older step; its history still has the later points."""
        with self._lock:
            self._picture = msgspec.structs.replace(self._picture, step=step, last=self._points[step - 1])

    def repeat_points(self, number: int) -> None:
        """Make the history one of so many steps."""
        with self._lock:
            last = self._points[-1]
            self._points = [msgspec.structs.replace(last, step=step) for step in range(1, number + 1)]

    def set_state(self, peer_id: str, state: PeerState, text: str = "") -> None:
        """A peer dies, or leaves."""
        with self._lock:
            for peer in self._peers:
                if peer.row.peer_id == peer_id:
                    peer.row = msgspec.structs.replace(peer.row, state=state)
                    if text:
                        self._tell("died" if state == "gone" else "left", text, peer.row)
            self._picture = self._look()

    # as a source

    def picture(self) -> RunPicture:
        return self._picture

    def points(self, since: float, limit: int) -> list[Point]:
        with self._lock:
            return thinned([point for point in self._points if point.time >= since], limit)

    def points_after(self, step: int, since: float, limit: int) -> list[Point]:
        with self._lock:
            found = [point for point in self._points[max(step, 0) :] if point.time >= since][:limit]
            self.num_read += len(found)
            return found

    def events(self, limit: int) -> list[RunEvent]:
        with self._lock:
            return self._events[:limit]

    def leader_of(self, peer_id: str) -> LeaderboardRow | None:
        with self._lock:
            return next((leader for leader in self._leaders() if peer_id in leader.peer_ids), None)

    # the run itself

    def _add_peer(self, name: str | None) -> SyntheticPeer:
        number = self._num_made
        self._num_made += 1
        letters = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
        if name is None:
            name = NAMES[number % len(NAMES)] if number % 4 != 3 else ""
        reaches: tuple[Reachability, ...] = ("direct", "direct", "client")
        speed = self._rng.lognormvariate(2.0, 0.9)
        row = PeerRow(
            peer_id="12D3KooW" + "".join(self._rng.choices(letters, k=44)),
            name=name,
            reach=reaches[self._rng.randrange(3)],
            version=self._rng.choice(["0.9.0", "0.9.0", "0.9.0", "0.8.2"]),
            device=DEVICES[number % len(DEVICES)],
            since=self._now,
            last_seen=self._now,
        )
        peer = SyntheticPeer(row, speed)
        self._peers.append(peer)
        return peer

    def _pass(self, seconds: float) -> None:
        self._now += seconds
        for peer in self._here():
            if peer.row.state in ("training", "averaging"):
                peer.pending += peer.samples_s * seconds
        if sum(peer.pending for peer in self._peers) >= self._target:
            self._make_step()

    def _here(self) -> list[SyntheticPeer]:
        return [peer for peer in self._peers if peer.row.since <= self._now]

    def _make_step(self) -> None:
        step = len(self._points) + 1
        total = 0
        for peer in self._here():
            row, samples = peer.row, int(peer.pending)
            if row.state not in ("training", "averaging"):
                continue
            missed = self._rng.random() < 0.02
            peer.pending = 0.0
            total += 0 if missed else samples
            peer.row = msgspec.structs.replace(
                row,
                step=step,
                samples=row.samples + (0 if missed else samples),
                rounds_committed=row.rounds_committed + (not missed),
                rounds_missed=row.rounds_missed + missed,
                reason=self._rng.choice(REASONS) if missed else "",
            )
        loss = 1.9 + 7.2 * math.exp(-step / 350) + self._rng.gauss(0, 0.03)
        training = [peer for peer in self._here() if peer.row.state == "training"]
        self._points.append(
            Point(
                time=self._now,
                step=step,
                loss=loss,
                heldout_loss=loss + 0.08 if step % 25 == 0 else None,
                samples=total,
                samples_per_second=sum(peer.samples_s for peer in training) * self._rng.uniform(0.94, 1.03),
                peers=len(training),
                learning_rate=1.76e-3 * min(step / 500, 1.0),
                bytes_sent=len(training) * 36_000_000,
            )
        )

    def _look(self) -> RunPicture:
        rows = []
        committed = sum(peer.row.samples for peer in self._peers)
        for peer in self._peers:
            row = peer.row
            if row.state in ("training", "averaging"):
                speed = round(peer.samples_s * self._rng.uniform(0.98, 1.02), 2)
                row = msgspec.structs.replace(row, last_seen=self._now, samples_per_second=speed)
            peer.row = row = msgspec.structs.replace(row, share=row.samples / committed if committed else 0.0)
            rows.append(row)
        rows.sort(key=lambda row: (row.state not in ("training", "averaging"), -row.samples))
        pending = sum(peer.pending for peer in self._peers)
        training = [peer for peer in self._peers if peer.row.state in ("training", "averaging")]
        speed = sum(peer.samples_s for peer in training)
        return RunPicture(
            run_id="albert-together",
            time=self._now,
            step=len(self._points),
            samples=int(pending),
            target_batch_size=self._target,
            num_peers=len(training),
            samples_per_second=round(speed, 3),
            eta_s=max(self._target - pending, 0) / speed if speed else None,
            committed_samples=committed,
            unit=self.unit,
            last=self._points[-1] if self._points else None,
            peers=rows,
            leaders=self._leaders()[:100],
            events=self._events[:50],
        )

    def _leaders(self) -> list[LeaderboardRow]:
        together: dict[str, list[PeerRow]] = defaultdict(list)
        for peer in self._peers:
            if peer.row.samples:
                together[peer.row.name or peer.row.peer_id].append(peer.row)
        committed = sum(peer.row.samples for peer in self._peers)
        groups = sorted(together.values(), key=lambda rows: -sum(row.samples for row in rows))
        leaders: list[LeaderboardRow] = []
        for place, rows in enumerate(groups, start=1):
            samples = sum(row.samples for row in rows)
            is_equal = bool(leaders) and leaders[-1].samples == samples
            leaders.append(
                LeaderboardRow(
                    rank=leaders[-1].rank if is_equal else place,
                    name=rows[0].name,
                    peer_ids=[row.peer_id for row in rows],
                    samples=samples,
                    share=samples / committed,
                )
            )
        return leaders

    def tell(self, kind: str, text: str, ago_s: float = 0.0) -> None:
        """Something happened so many seconds ago."""
        with self._lock:
            self._events.insert(0, RunEvent(time=self._now - ago_s, kind=kind, text=text))  # type: ignore[arg-type]
            self._events.sort(key=lambda event: -event.time)
            self._picture = self._look()

    def _tell(self, kind: str, text: str, row: PeerRow) -> None:
        event = RunEvent(time=self._now, kind=kind, text=text, peer_id=row.peer_id, name=row.name)  # type: ignore[arg-type]
        self._events.insert(0, event)
