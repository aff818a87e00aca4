"""The peers of a run as rows, and what happens to them as events, from what they publish. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from manyhands.averaging.messages import short_id
from manyhands.averaging.peer_records import PeerRecord, SeenRecord
from manyhands.averaging.timing import DAY_S
from manyhands.base.identity import PeerId
from manyhands.base.text import counted
from manyhands.monitor.credit import Credit
from manyhands.monitor.history import SeenPeer
from manyhands.monitor.picture import EventKind, PeerRow, PeerState, Reachability, RunEvent
from manyhands.optim.metrics import AccountRecord

SILENT_S = 13.5
"""Seconds without a record after which a peer is gone. It publishes every 10 s, and less often in a crowd."""
SILENT_SHARE = 0.45
"""Share of the lifetime of its records after which a silent peer is gone, if that is longer than
``SILENT_S``. A peer publishes three records in one lifetime."""
SHOWN_S = 3600.0
"""Seconds for which a peer that is gone or has left stays in the table."""
MAX_GONE = 1000
"""The most peers in the table that are gone or have left."""
MAX_KNOWN = 50_000
"""Most peers whose names are kept. Beyond it, peers without credit are forgotten: anybody can make up new ids."""
MAX_ALIKE = 5
"""Most events of one kind at one look; further ones are summed up in one event."""
MAX_NAMED = 3


@dataclass
class Person:
    """One peer, as last seen.

    Attributes:
        since, last_seen: seconds since 1970.
        since_step: global step of the run when its session began.
        expires_at: of its progress record, which was published at ``heard_at`` (loop time).
        rounds_before, steps_before: number of steps credited to it, and in all, when it came.
        missed: steps without its samples; None as long as it is here.
    """

    peer_id: PeerId
    record: PeerRecord
    since: float
    since_step: int
    last_seen: float
    expires_at: float
    heard_at: float
    state: PeerState = "training"
    name: str = ""
    account: AccountRecord | None = None
    rounds_before: int = 0
    steps_before: int = 0
    missed: int | None = None

    @property
    def is_here(self) -> bool:
        return self.state in ("training", "averaging")

    @property
    def longest_silence_s(self) -> float:
        """Seconds without a record of it after which it is gone."""
        return longest_silence_s(self.record)

    @property
    def shown(self) -> str:
        """Its name, or the end of its id."""
        return self.name or f"peer ...{self.peer_id[-6:]}"

    def known(self) -> SeenPeer:
        """Its entry in the history."""
        return SeenPeer(
            short_id(self.peer_id), self.peer_id, self.name, self.since, self.since_step, self.record.began_at,
            self.last_seen,
        )  # fmt: skip


def longest_silence_s(record: PeerRecord) -> float:
    """The seconds without a record after which a peer is gone."""
    return max(SILENT_S, SILENT_SHARE * min(record.ttl_s, DAY_S))


class PeerTable:
    """The peers of one run.

    Args:
        known: those that were seen before this monitor started, by short id.
    """

    def __init__(self, known: Mapping[bytes, SeenPeer] | None = None) -> None:
        self._people: dict[PeerId, Person] = {}
        self._known = dict(known or {})
        self.version = 0
        """Grows when a name, or a peer, is new."""

    def silence_due_s(self, now: float) -> float:
        """Seconds until the first peer that is here counts as gone, if it stays silent; infinite without any."""
        here = [person for person in self._people.values() if person.is_here]
        return min([person.heard_at + person.longest_silence_s - now for person in here], default=math.inf)

    @property
    def names(self) -> dict[bytes, tuple[str, str]]:
        """Peer id and name of all peers that were ever seen, by short id."""
        return {peer: (known.peer_id, known.name) for peer, known in self._known.items()}

    def learn(self, names: Mapping[PeerId, str]) -> list[SeenPeer]:
        """Note the names of peers that were here before this monitor started; returns those that are new."""
        learnt = [
            SeenPeer(short_id(peer_id), peer_id, name, 0.0, 0, 0.0, 0.0)
            for peer_id, name in names.items()
            if short_id(peer_id) not in self._known
        ]
        if learnt:
            self._known |= {known.peer: known for known in learnt}
            self.version += 1
        return learnt

    def look(
        self,
        observed: Mapping[PeerId, SeenRecord],
        accounts: Mapping[PeerId, AccountRecord],
        *,
        now: float,
        wall_time: float,
        step: int,
        credit: Credit,
    ) -> tuple[list[RunEvent], list[SeenPeer]]:
        """Add the records of a look; returns the events, the oldest first, and the peers that have changed.

        Args:
            observed: the progress records that count now.
            accounts: the last account of each peer.
            now: loop time; ``wall_time`` is the same instant in seconds since 1970.
            step: of the run.
        """
        news = _News(wall_time, step)
        changed: list[Person] = []
        for peer_id, seen in observed.items():
            silent_s = now - seen.since
            is_silent = silent_s > longest_silence_s(seen.record)
            person = self._people.get(peer_id)
            if not is_silent and (person is None or not person.is_here):
                person = self._people[peer_id] = self._came(peer_id, seen, wall_time, step, credit, person, news)
                changed.append(person)
            elif person is None:
                continue
            elif is_silent and person.is_here:
                self._went(person, "gone", credit, news)
                changed.append(person)
            person.record = seen.record
            person.expires_at = seen.expires_at
            person.heard_at = seen.since
            person.last_seen = wall_time - max(silent_s, 0.0)
        for peer_id, person in self._people.items():
            account = accounts.get(peer_id)
            if person.is_here and (peer_id not in observed or (account is not None and account.has_left)):
                has_said = (account is not None and account.has_left) or person.expires_at > now
                self._went(person, "left" if has_said else "gone", credit, news)
                changed.append(person)
            if account is not None and account is not person.account:
                if account.name != person.name:
                    person.name = account.name
                    changed.append(person)
                _compare(person, account, news)
                person.account = account
        known = [person.known() for person in {person.peer_id: person for person in changed}.values()]
        if known:
            self._known |= {entry.peer: entry for entry in known}
            self.version += 1
        away = [person for person in self._people.values() if not person.is_here]
        for number, person in enumerate(sorted(away, key=lambda person: -person.last_seen)):
            if number >= MAX_GONE or wall_time - person.last_seen >= SHOWN_S:
                del self._people[person.peer_id]
        return news.told(), known

    def forget(self, credit: Credit) -> list[bytes]:
        """If too many are known, forget those without credit that were here longest ago; returns their short ids."""
        if len(self._known) <= MAX_KNOWN:
            return []
        here = {short_id(person.peer_id) for person in self._people.values() if person.is_here}
        rest = [
            known
            for known in self._known.values()
            if known.peer not in here and not credit.total_of(PeerId(known.peer_id)).samples
        ]
        rest.sort(key=lambda known: known.last_seen)
        forgotten = [known.peer for known in rest[: len(self._known) - MAX_KNOWN * 9 // 10]]
        for peer in forgotten:
            del self._known[peer]
        return forgotten

    def _came(
        self,
        peer_id: PeerId,
        seen: SeenRecord,
        wall_time: float,
        step: int,
        credit: Credit,
        before: Person | None,
        news: _News,
    ) -> Person:
        known = self._known.get(short_id(peer_id))
        began_at = seen.record.began_at
        is_same_session = known is not None and began_at > 0 and began_at == known.began_at
        person = Person(peer_id, seen.record, wall_time, step, wall_time, seen.expires_at, seen.since)
        person.name = known.name if known is not None else ""
        lag = max(step - credit.newest_step, 0) if credit.newest_step >= 0 else 0  # steps that are credited soon
        person.rounds_before = credit.seen_rounds_of(peer_id)
        person.steps_before = credit.num_seen_steps + lag
        if is_same_session:
            assert known is not None
            person.since = known.since
            person.since_step = known.since_step
        if before is not None:
            person.account = before.account
        if before is not None or not is_same_session:
            again = " again" if before is not None or known is not None else ""
            news.add("joined", person, f"has joined{again}")
        return person

    @staticmethod
    def _went(person: Person, state: PeerState, credit: Credit, news: _News) -> None:
        person.state = state
        _, person.missed = _counts(person, credit)
        if state == "left":
            news.add("left", person, "has left")
        else:
            news.add("died", person, "has published nothing for a while, and is considered gone")

    def rows(self, credit: Credit, *, is_averaging: bool) -> list[PeerRow]:
        """All peers: those that train first, by samples."""
        newest = credit.newest_step
        of_all = credit.num_samples
        last = credit.shares_of(newest)
        rows = [
            _row(person, credit, newest, last, of_all, is_averaging=is_averaging) for person in self._people.values()
        ]
        return sorted(rows, key=lambda row: (row.state in ("gone", "left"), -row.samples, row.peer_id))


def _row(
    person: Person, credit: Credit, newest: int, last: Mapping[bytes, int], of_all: int, *, is_averaging: bool
) -> PeerRow:
    record = person.record
    account = person.account
    total = credit.total_of(person.peer_id)
    committed, missed = _counts(person, credit)
    return PeerRow(
        peer_id=person.peer_id,
        name=person.name,
        state="averaging" if person.state == "training" and is_averaging else person.state,
        reach=reach_of(record),
        relay=record.relay,
        version=account.version if account is not None else "",
        device=account.device if account is not None else "",
        since=person.since,
        last_seen=person.last_seen,
        step=record.position.step,
        samples=total.samples,
        share=total.samples / of_all if of_all else 0.0,
        samples_per_second=record.samples_per_second,
        rounds_committed=committed,
        rounds_missed=0 if record.is_auxiliary else missed,
        reason="" if short_id(person.peer_id) in last else _reason(person, newest),
    )


def reach_of(record: PeerRecord) -> Reachability:
    """Return how others reach a peer, by its record."""
    if record.is_auxiliary:
        return "auxiliary"
    if not record.is_client:
        return "direct"
    if record.is_punched:
        return "punched"
    return "relayed" if record.relay else "client"


def _counts(person: Person, credit: Credit) -> tuple[int, int]:
    """The number of credited steps since a peer came: with its samples, and without."""
    committed = max(credit.seen_rounds_of(person.peer_id) - person.rounds_before, 0)
    if person.missed is not None:
        return committed, person.missed
    return committed, max(credit.num_seen_steps - person.steps_before - committed, 0)


def _reason(person: Person, newest: int) -> str:
    """Why no samples of a peer are in the newest credited step."""
    record = person.record
    account = person.account
    if newest < 0:
        return ""
    if record.is_auxiliary:
        return "it has no data, and helps to average"
    if account is not None and account.failure and account.failed_step >= newest:
        return account.failure
    if not person.is_here:
        return "it is not there any more"
    if person.since_step >= newest:
        return "it joined after that step"
    if account is None:
        return "it publishes no account of its steps: its program or version cannot"
    if record.position.step < newest:
        return f"it has not made step {newest} yet"
    return "it had no samples in that step"


def _compare(person: Person, account: AccountRecord, news: _News) -> None:
    """Report what has failed since the last account of a peer."""
    before = person.account
    if before is None or account.rounds_committed + account.rounds_aborted < (
        before.rounds_committed + before.rounds_aborted
    ):
        return  # the first one of its process
    failure = account.failure or "for no stated reason"
    if account.rounds_aborted > before.rounds_aborted:
        news.add("aborted", person, f"could not make step {account.failed_step}: {failure}", failure)
    if account.parameters_reloaded > before.parameters_reloaded:
        news.add("reloaded", person, "has loaded the state of the others: its parameters differed from the majority's")
    elif account.states_loaded > before.states_loaded and before.steps:  # the first load is a part of joining
        news.add("reloaded", person, "has loaded the state of the others, as it was behind")


class _News:
    """Collects events, and sums up many of one kind in one event."""

    def __init__(self, time: float, step: int) -> None:
        self._time = time
        self._step = step
        self._found: defaultdict[tuple[EventKind, str], list[tuple[Person, str]]] = defaultdict(list)

    def add(self, kind: EventKind, person: Person, text: str, cause: str = "") -> None:
        """Note an event. Many of one kind and cause become one event."""
        self._found[kind, cause].append((person, text))

    def told(self) -> list[RunEvent]:
        """The events to report."""
        events: list[RunEvent] = []
        by_kind: defaultdict[EventKind, list[tuple[list[tuple[Person, str]], str]]] = defaultdict(list)
        for (kind, cause), found in self._found.items():
            by_kind[kind].append((found, cause))
        for kind, groups in by_kind.items():
            for found, cause in groups[:MAX_ALIKE]:
                events.extend(self._of_one_cause(kind, found, cause))
            if len(groups) > MAX_ALIKE:
                number = sum(len(found) for found, _ in groups[MAX_ALIKE:])
                events.append(self._event(kind, f"the same happened to {counted(number, 'more peer')}"))
        return events

    def _of_one_cause(self, kind: EventKind, found: Sequence[tuple[Person, str]], cause: str) -> list[RunEvent]:
        if len(found) > (1 if cause else MAX_ALIKE):
            names = ", ".join(person.shown for person, _ in found[:MAX_NAMED])
            more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
            what = found[0][1] if cause else _PLURAL[kind]
            return [self._event(kind, f"{counted(len(found), 'peer')} ({names}{more}): {what}")]
        return [
            RunEvent(
                time=self._time, kind=kind, step=self._step, text=f"{person.shown} {text}", peer_id=person.peer_id,
                name=person.name,
            )
            for person, text in found
        ]  # fmt: skip

    def _event(self, kind: EventKind, text: str) -> RunEvent:
        return RunEvent(time=self._time, kind=kind, step=self._step, text=text)


_PLURAL: Mapping[EventKind, str] = {
    "joined": "have joined",
    "left": "have left",
    "died": "have published nothing for a while, and are considered gone",
    "reloaded": "have loaded the state of the others",
}


def median_of(accounts: Iterable[AccountRecord], value: Callable[[AccountRecord], float | None]) -> float | None:
    """The median of a value that peers report; None if no peer reports it."""
    values = [number for account in accounts if (number := value(account)) is not None]
    return statistics.median(values) if values else None
