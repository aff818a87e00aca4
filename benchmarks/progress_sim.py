"""What a run of many peers costs each of them to know when its next step is due, and how well they know it.

    python benchmarks/progress_sim.py --peers 50,200,1000,2000 --churn 0,0.1 [--reads all,part] [--json FILE]

All peers compute batches and publish their progress records in virtual time. Speeds differ by a factor of ten or more
(log-normal, with a standard deviation of 0.7 times the mean). Some of the peers, the *observers*, run the real
``ProgressTracker``: it reads the records with the real ``Reader`` from a holder, predicts the end of the step, and
decides when the step begins. All peers are one group, unless ``--max-group-size`` is smaller. Some observers lead in
turn: the leader of a round calls the other members. Four are ordinary members, and four are newcomers, if there are
any: they find the run, load its state, and come by their own decision.

Records are real, and are encoded, stored, sent, decoded and looked at. Their signatures are random bytes: what it takes
to sign and to check them is measured before, and added for each record that a peer has not seen. Modelled are: the five
holders of the key (they always hold the same, and answer after 60 ms), lookups (a newcomer asks all five), rounds (3 s,
in which nobody computes), downloads (20 s) and the loss of peers.

``--churn`` is the share of peers that is replaced in a minute, one by one. Half of those that end say goodbye. A
newcomer publishes at once, and computes its first batch from 20 s later on.

``--reads all`` is how records were read before ADR 48: all of them at each refresh. A row has:

  bytes_per_s      that a peer receives for progress, the mean of all: reads, publications, requests that it serves as
                   a holder. It sends as many.
  busiest_bytes_per_s  that one of the five holders sends
  cpu_share        of one core, of a peer: its own reads, publications and predictions, and its mean share of serving.
                   busiest_cpu_share is that of a holder
  reads_per_step   of one peer
  eta_error_s      mean distance between the predicted and the true end of the step, at each batch; eta_error is the
                   same as a share of the step
  samples_error    by how much the true samples differ from the target when an observer begins the step, as a share of
                   the target: the mean distance; samples_bias is the mean difference
  late_steps       share of all steps of the observers that began more than a tenth of a step after the true end
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import math
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import msgspec
from _command_line import Parser, json_path, positive, positive_int, run, write_json
from _worker import Worker

from manyhands.averaging.grid.seats import NO_SEAT, Seat, layout_for
from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import GOODBYE, KEEP_ALIVES, PEER_RECORD, PROGRESS_KIND, PeerRecord, peer_key
from manyhands.averaging.roster import Attendance, Roster
from manyhands.base.identity import Identity, PeerId
from manyhands.dht import Contact, DhtConfig, DhtNode, Part
from manyhands.dht import records as dht_records
from manyhands.dht.ids import id_to_bytes
from manyhands.dht.issuing import Issuer
from manyhands.dht.messages import FIND, STORE, FindRequest, FindResponse, StoreOutcome, StoreRequest, StoreResponse
from manyhands.dht.reader import Reader
from manyhands.dht.records import AgedRecord, Reason, Record, encode_value
from manyhands.dht.storage import Storage
from manyhands.optim.config import ProgressConfig
from manyhands.optim.run import tracker
from manyhands.optim.run.progress import NUM_LEADERS, crowd_factor, is_news
from manyhands.optim.run.tracker import ProgressTracker
from manyhands.rpc import Endpoint
from manyhands.rpc.frames import Request, Response, encode_frame
from manyhands.testing import VirtualLoop

RUN_ID = "albert-base"
KEY = peer_key(RUN_ID, PROGRESS_KIND)
NUM_HOLDERS = DhtConfig().replicas
ROUND_TRIP_S = 0.06
CALL_S = 0.1  # until the members of a group know that another one has begun the round
ROUNDS_S = 3.0
JOINS_S = 20.0
MEAN_SPEED = 8.0  # samples a second
SPREAD = 0.7  # of the speeds, standard deviation over mean
LATE_SHARE = 0.1  # of a step
NUM_MEMBERS, NUM_GUESTS = 4, 4  # observers
EPOCH_S = 1_800_000_000.0
TLS_RECORD_BYTES = 22
CONFIG = ProgressConfig()


def frame_bytes(method: str, body: object, *, is_answer: bool) -> int:
    """Size of a call or an answer on the wire, with the overhead of its TLS record."""
    raw = msgspec.Raw(msgspec.msgpack.encode(body))
    frame = Response(1 << 20, raw) if is_answer else Request(1 << 20, method, 3.0, raw)
    return len(encode_frame(frame)) + TLS_RECORD_BYTES


@dataclass
class Used:
    """What the observers in one role have used, and for how long they were in it."""

    seconds: float = 0.0
    num_bytes: float = 0.0
    cpu_s: float = 0.0
    serving_s: float = 0.0
    num_reads: int = 0


class Verdicts:
    """Takes the place of the cache of checked signatures for one peer, and counts what it has to check."""

    def __init__(self) -> None:
        self.num_checks = 0
        self._seen: set[Any] = set()

    def get(self, record: Any) -> Any:
        if record not in self._seen:
            self._seen.add(record)
            self.num_checks += 1
        return record, None

    def move_to_end(self, record: Any) -> None:
        """Does nothing: nothing is dropped."""


class Timed:
    """Awaits a read, and measures the processor time that it takes itself."""

    def __init__(self, read: Coroutine[Any, Any, Any], verdicts: Verdicts) -> None:
        self.took_s = 0.0
        self._read, self._verdicts = read, verdicts

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._read.__await__()
        sent: Any = None
        while True:
            shared, dht_records._verdicts = dht_records._verdicts, cast(Any, self._verdicts)  # noqa: SLF001
            began = time.process_time()
            try:
                waits_for = steps.send(sent)
            except StopIteration as end:
                return end.value
            finally:
                self.took_s += time.process_time() - began
                dht_records._verdicts = shared  # noqa: SLF001
            sent = yield waits_for


class StandInEndpoint:
    """The part of an endpoint that a tracker uses."""

    client_mode = False
    gates: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, peer_id: PeerId, address: str) -> None:
        self.peer_id = peer_id
        self.addresses = [address, f"/ip4/192.168.1.7/tcp/31337/p2p/{peer_id}"]
        self.counters: Counter[str] = Counter()

    def learn(self, *_: object) -> None:
        """Does nothing."""

    def carries_bulk(self, _: PeerId) -> bool:
        return True

    is_connected = carries_bulk


class Holders:
    """The five peers that hold the key: one storage, as all of them hold the same.

    Attributes:
        num_bytes: of publications, sent to a holder and received from it.
        serving_s: processor time of all holders for publications.
        check_s, issue_s: processor time for the check of one signature, and to make a signed record.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.schemas = {KEY: PEER_RECORD}
        self.storage = Storage(DhtConfig(), self.schemas)
        self.names = tuple(Identity.from_seed(bytes([number] * 32)).peer_id for number in range(NUM_HOLDERS))
        self.num_bytes: Counter[str] = Counter()
        self.serving_s = 0.0
        self._sequence = 0
        self._rng = random.Random(1)
        outcome = StoreResponse([StoreOutcome(is_stored=True, code="accepted")])
        self._confirmation_bytes = frame_bytes("", outcome, is_answer=True)
        self.check_s = self.issue_s = 0.0

    def measure(self, records: Sequence[tuple[Identity, Any]]) -> None:
        """Measure what signing and checking take."""
        began = time.process_time()
        issued = [
            Issuer(identity, DhtConfig(), self.wall_clock, {}).issue(KEY, identity.peer_id, value, 30.0)
            for identity, value in records
        ]
        signed = time.process_time()
        assert not any(dht_records.fault_of(record, DhtConfig()) for record in issued)
        self.issue_s = (signed - began) / len(records)
        self.check_s = (time.process_time() - signed) / len(records)
        dht_records._verdicts = cast(Any, Verdicts())  # noqa: SLF001 (also of reads that are not timed)

    def wall_clock(self) -> float:
        return EPOCH_S + self.loop.now

    def store(self, peer_id: PeerId, value: Any, ttl_s: float) -> None:
        """Store a record of a peer at each holder."""
        self._sequence += 1
        record = Record(
            key=KEY, subkey=peer_id, value=encode_value(value), sequence=1_800_000_000_000 + self._sequence,
            issued_at=self.wall_clock(), ttl_s=ttl_s, owner=peer_id, signature=self._rng.randbytes(64),
        )  # fmt: skip
        began = time.process_time()
        reason = self.storage.put(record, self.loop.now + ttl_s, self.loop.now)
        assert reason.is_stored, reason
        self.serving_s += NUM_HOLDERS * (time.process_time() - began + self.check_s)
        self.num_bytes["published"] += frame_bytes(STORE.name, StoreRequest([AgedRecord(record, 0.0)]), is_answer=False)
        self.num_bytes["confirmed"] += self._confirmation_bytes
        self.num_bytes["publications"] += 1


class Line:
    """What the ``Reader`` of one peer uses of its DHT node: its lookups, the holders that it knows, its limits.

    A newcomer that does not know the holders asks all of them, as at the end of a lookup.

    Attributes:
        num_bytes: asked and answered, since they were last taken.
        decoding_s, serving_s: processor time of this peer, and of the holders that it asks.
    """

    def __init__(self, holders: Holders, rng: random.Random) -> None:
        self.num_bytes = self.num_reads = 0
        self.decoding_s = self.serving_s = 0.0
        self._holders, self._rng = holders, rng
        self._known: tuple[PeerId, ...] = ()

    def recall_complete(self, key: str, now: float) -> tuple[PeerId, ...]:
        return self._known

    recall = recall_complete

    def among(self, key: str, peers: Iterable[PeerId]) -> list[PeerId]:
        return list(peers)

    def remember(self, key: str, holders: Sequence[PeerId], now: float, complete: Collection[PeerId]) -> None:
        self._known = tuple(holders)

    def may_read(self, source: PeerId, key: str) -> bool:
        return True

    def charge_read(self, source: PeerId, key: str, num_bytes: int) -> None:
        """Does nothing: the limit is for strangers."""

    def may_check(self, source: PeerId, records: Sequence[Any]) -> bool:
        return True

    def note(self, reason: Reason, source: PeerId, record: Record) -> None:
        """A record was refused, as it has just expired."""
        if reason is not Reason.EXPIRED:
            raise AssertionError(f"{reason}: {record}")

    async def lookup(
        self, target: int, timeout_s: float, num: int, key: str, on_answer: Any, *, owners: Any, after: Any, most: Any
    ) -> list[Contact]:
        for peer_id in self._holders.names:
            named = owners(peer_id)
            request = FindRequest(id_to_bytes(target), key, owners=named, after=after, most=most)
            on_answer(peer_id, await self.ask(peer_id, FIND, request))
        return [Contact(peer_id, []) for peer_id in self._holders.names]

    async def ask(self, peer_id: PeerId, method: Any, request: FindRequest) -> FindResponse:
        began = time.process_time()
        storage, now = self._holders.storage, self._holders.loop.now
        if request.wants_records:
            page, is_more = storage.page(KEY, request.after, now, request.owners, request.most)
            num_held = storage.num_held(KEY, now) if request.most else 0
            answer = FindResponse([], [held.aged(now) for held in page], is_more=is_more, num_held=num_held)
        else:
            answer = FindResponse([], [], storage.digest(KEY, now, request.owners))
        raw = msgspec.msgpack.encode(answer)
        served = time.process_time()
        self.num_bytes += frame_bytes(method.name, request, is_answer=False)
        self.num_bytes += frame_bytes("", msgspec.Raw(raw), is_answer=True)
        self.serving_s += served - began
        began = time.process_time()
        decoded = msgspec.msgpack.decode(raw, type=FindResponse)
        self.decoding_s += time.process_time() - began
        await asyncio.sleep(ROUND_TRIP_S)
        return decoded


class StandInNode:
    """The DHT node of an observer: a real ``Reader``."""

    def __init__(self, holders: Holders, line: Line, identity: Identity, rng: random.Random, met: Any) -> None:
        self.met: dict[str, Any] = {}
        self._holders, self._line = holders, line
        part = cast(Any, line)
        self._reader = Reader(
            identity.peer_id, DhtConfig(), part, Storage(DhtConfig()), part, part, holders.schemas, {},
            lambda _: met(), rng, holders.wall_clock,
        )  # fmt: skip

    async def get(self, key: str, *, quickly: bool = False, owners: Iterable[str] | None = None) -> Any:
        self._line.num_reads += owners is None
        only = None if owners is None else frozenset(owners)
        return (await self._reader.read(key, quickly, only)).values(self._holders.loop.now)

    async def get_part(self, key: str, most: int) -> Part:
        self._line.num_reads += 1
        result = await self._reader.read_part(key, most)
        return Part(result.values(self._holders.loop.now), result.num_shown, result.num_held)

    async def store(self, key: str, value: Any, ttl_s: float, subkey: str) -> int:
        self._holders.store(PeerId(subkey), value, ttl_s)
        return NUM_HOLDERS


class Trainer:
    """A peer that computes batches.

    Attributes:
        samples: in batches that have ended since the last step.
        tracker: that of an observer.
    """

    def __init__(self, number: int, rng: random.Random, holders: Holders) -> None:
        self.identity = Identity.from_seed(rng.randbytes(32))
        self.peer_id = self.identity.peer_id
        sigma = math.sqrt(math.log(1 + SPREAD**2))
        speed = MEAN_SPEED * rng.lognormvariate(-(sigma**2) / 2, sigma)
        self.batch = max(1, round(speed * rng.uniform(2.0, 6.0)))
        self.batch_s = self.batch / speed
        self.address = f"/ip4/{11 + (number >> 16)}.{number >> 8 & 255}.{number & 255}.2/tcp/31337/p2p/{self.peer_id}"
        self.began_at = holders.wall_clock()
        self.samples = 0
        self.counted_at = 0.0
        self.published: tuple[PeerRecord, float] | None = None
        self.is_alive = True
        self.is_trained = False  # whether it has the state, and computes
        self.sketch = rng.randbytes(64)
        self.seat = NO_SEAT
        self.tracker: ProgressTracker | None = None
        self.line: Line | None = None
        self.predicting_s = 0.0

    @property
    def speed(self) -> float:
        return self.batch / self.batch_s


class Simulation:
    """One run.

    Args:
        churn_per_min: share of the peers that is replaced in a minute.
        reads: "all" or "part".
        step_s: how long the peers compute for a step, if none is lost.
        num_steps: that are measured, after two others.
        max_group_size: larger runs stand in a grid.
    """

    def __init__(
        self, num_peers: int, churn_per_min: float, reads: str, step_s: float, num_steps: int, max_group_size: int,
        seed: int,
    ) -> None:  # fmt: skip
        if reads == "all":
            tracker.LARGE = sys.maxsize  # type: ignore[attr-defined]
        self._head = {"reads": reads, "peers": num_peers, "churn_per_min": churn_per_min}
        self._num_peers, self._churn_per_min, self._num_steps = num_peers, churn_per_min, num_steps
        self._rng = random.Random(f"{seed} {num_peers}")
        self._loop = VirtualLoop()
        self._holders = Holders(self._loop)
        self._layout = layout_for(num_peers, max_group_size)
        self._factor = crowd_factor(num_peers)
        self._trainers = [Trainer(number, self._rng, self._holders) for number in range(num_peers)]
        self._num_made = num_peers
        # one of them leads each step: of founders, the one with the lowest id that has not led yet
        by_id = sorted(self._trainers, key=lambda trainer: trainer.peer_id)
        self._num_leading = min(num_steps + 4, num_peers // 2)
        self._observers = by_id[: self._num_leading] + by_id[-NUM_MEMBERS:]
        self._target = round(sum(trainer.speed for trainer in self._trainers) * step_s)
        self._step_s = step_s
        self._step = 0
        self._position = Position(0, hashlib.sha256(b"run").digest())
        self._roster = Roster()
        self._computes = False
        self._samples = 0  # the true ones, of all peers that are there
        self._due_at: float | None = None
        self._began: dict[PeerId, tuple[float, int]] = {}
        self._predicted: list[tuple[float, float]] = []  # when, and for when
        self._all_began = asyncio.Event()
        self._is_measured = False
        self._used: defaultdict[str, Used] = defaultdict(Used)
        self._roles: dict[PeerId, str] = {}
        self._roles_since = 0.0
        self._guest_shares: list[float] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._figures: dict[str, list[float]] = defaultdict(list)

    def close(self) -> None:
        """Does nothing."""

    def run(self) -> dict[str, Any]:
        """Run the simulation; returns the row."""
        logging.getLogger("manyhands").setLevel(logging.ERROR)
        return self._loop.run(self._story(), math.inf)

    async def _story(self) -> dict[str, Any]:
        for trainer in self._trainers:
            trainer.is_trained = True
        for trainer in self._observers:
            self._observe(trainer)
        self._next_position()
        values = [msgspec.to_builtins(self._record(one), builtin_types=(bytes,)) for one in self._trainers[:50]]
        self._holders.measure([(one.identity, value) for one, value in zip(self._trainers, values, strict=False)])
        for trainer in self._trainers:
            self._publish(trainer)
        for trainer in self._observers:
            assert trainer.tracker is not None
            await trainer.tracker.find_place()
            trainer.tracker.start()
        self._begin_task(self._churn())
        for number in range(self._num_steps + 2):
            if number == 2:
                self._take_used()
                self._used.clear()
                self._holders.serving_s = 0.0
                self._holders.num_bytes.clear()
                self._is_measured, self._measured_from = True, self._loop.now
            await self._one_step()
        row = self._row()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for trainer in self._observers:
            assert trainer.tracker is not None
            trainer.tracker._is_started = False  # noqa: SLF001 (it need not say goodbye)
            await trainer.tracker.close()
        return row

    def _begin_task(self, coro: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error
            self._all_began.set()

    # the steps

    async def _one_step(self) -> None:
        self._due_at, self._began, self._predicted = None, {}, []
        self._all_began.clear()
        began = self._loop.now
        self._computes = True
        for trainer in self._trainers:
            if trainer.is_trained:
                self._begin_batches(trainer)
        await self._all_began.wait()
        if self._error is not None:
            raise self._error
        self._computes = False
        if self._is_measured:
            self._judge(began)
        for trainer in self._in_steps():
            cast(ProgressTracker, trainer.tracker).is_busy = True
        await asyncio.sleep(ROUNDS_S)
        self._next_position()

    def _in_steps(self) -> list[Trainer]:
        """The observers that have the state."""
        return [trainer for trainer in self._observers if trainer.is_trained]

    def _next_position(self) -> None:
        """All peers have made the step."""
        self._take_used()
        self._step += 1
        self._position = Position(self._step, hashlib.sha256(str(self._step).encode()).digest())
        self._samples = 0
        here = [trainer for trainer in self._trainers if trainer.is_trained]
        if not self._layout.sides:
            ids = {trainer.peer_id: True for trainer in here}
            leader = next((one for one in self._roster.leaders() if one in ids), self._observers[0].peer_id)
            self._roster = self._roster.after(Attendance(leader, ids))
        for cell, trainer in enumerate(here):
            trainer.samples, trainer.counted_at = 0, self._loop.now
            if self._layout.sides:
                first = self._step * self._layout.num_rounds
                trainer.seat = Seat(self._layout, cell % self._layout.num_cells, first - first % 16)
            if trainer.tracker is not None:
                self._move(trainer, trainer.tracker, [one.peer_id for one in here])
            elif trainer.published is not None:
                soon = self._loop.now + self._rng.uniform(0, CONFIG.min_refresh_s)
                self._loop.call_outside(soon, self._publish, trainer)
        self._roles = {trainer.peer_id: self._role_of(trainer.peer_id) for trainer in self._observers}
        members = self._roster.members
        if not self._layout.sides:
            self._guest_shares.append(1 - len(members & {one.peer_id for one in self._trainers}) / self._num_peers)

    def _role_of(self, peer_id: PeerId) -> str:
        """Leader, deputy (one of the next leaders), member or guest; all peers of a grid are members."""
        ids = {trainer.peer_id for trainer in self._trainers if trainer.is_trained}
        leaders = [one for one in self._roster.leaders() if one in ids]
        if self._layout.sides:
            return "member"
        if peer_id in leaders[:NUM_LEADERS]:
            return "leader" if peer_id == leaders[0] else "deputy"
        return "member" if peer_id in self._roster.members else "guest"

    def _move(self, trainer: Trainer, own: ProgressTracker, members: list[PeerId]) -> None:
        own.is_busy = False
        if self._layout.sides:
            own.sit(trainer.seat)
            members = [*own.view.awaited]  # as in a step in a grid, nobody knows all members
        own.move(self._position, self._step * self._target, members, trainer.sketch)

    def _begin_batches(self, trainer: Trainer) -> None:
        first_s = self._rng.uniform(0.5, 1.0) * trainer.batch_s
        self._loop.call_outside(self._loop.now + first_s, self._batch, trainer, self._step)

    def _batch(self, trainer: Trainer, step: int) -> None:
        """A batch has ended."""
        if not (self._computes and step == self._step and trainer.is_alive):
            return
        now = self._loop.now
        trainer.samples += trainer.batch
        trainer.counted_at = now
        self._samples += trainer.batch
        if self._due_at is None and self._samples >= self._target:
            self._due_at = now
        if trainer.tracker is None:
            self._publish_news(trainer)
            self._loop.call_outside(now + trainer.batch_s, self._batch, trainer, step)
        elif trainer.peer_id not in self._began:
            self._begin_task(self._decide(trainer, trainer.tracker, step))

    async def _decide(self, trainer: Trainer, own: ProgressTracker, step: int) -> None:
        """What an observer does after a batch, as ``Collaboration.decide`` does."""
        began = time.process_time()
        own.report(trainer.samples, trainer.speed, trainer.batch_s)
        wants_look = own.is_worth_a_look()
        trainer.predicting_s += time.process_time() - began
        if wants_look:
            await own.look(1.0)
        if step != self._step or not self._computes or trainer.peer_id in self._began:
            return
        now = self._loop.now
        if math.isfinite(own.outlook.eta_s) and self._due_at is None:
            self._predicted.append((now, now + own.outlook.eta_s))
        if own.is_due():
            self._begin(trainer)
        else:
            self._loop.call_outside(now + trainer.batch_s, self._batch, trainer, step)

    def _begin(self, trainer: Trainer) -> None:
        """An observer begins the step. In one group the leader calls all members when it does, in a grid anybody."""
        now = self._loop.now
        self._began[trainer.peer_id] = (now, self._samples)
        role = self._roles.get(trainer.peer_id, "guest")
        if role == "leader" or (self._layout.sides and len(self._began) == 1):
            for other in self._in_steps():
                if other is not trainer and self._roles.get(other.peer_id) in ("member", "deputy"):
                    self._loop.call_outside(now + CALL_S, self._called, other, self._step)
        self._end_if_all_began(self._step)

    def _called(self, trainer: Trainer, step: int) -> None:
        """An observer is called to the round; it comes when its batch ends."""
        if step == self._step and trainer.tracker is not None:
            self._begin_task(self._call(trainer.tracker))

    async def _call(self, own: ProgressTracker) -> None:
        own.call_to_round()

    def _end_if_all_began(self, step: int) -> None:
        """End the computing when the members among the observers have begun the step, and the guests or 5 s later."""
        absent = [trainer for trainer in self._in_steps() if trainer.peer_id not in self._began]
        members_are_here = not any(self._roles.get(one.peer_id, "guest") != "guest" for one in absent)
        last = max([at for at, _ in self._began.values()], default=math.inf)
        if step != self._step or self._all_began.is_set():
            return
        if self._due_at is not None and members_are_here and (not absent or self._loop.now >= last + 5.0):
            self._all_began.set()
        else:
            self._loop.call_outside(self._loop.now + 0.1, self._end_if_all_began, step)

    def _judge(self, began: float) -> None:
        due_at, figures = cast(float, self._due_at), self._figures
        step_s = due_at - began
        figures["step"].append(step_s)
        figures["eta"] += [abs(predicted - due_at) for _, predicted in self._predicted]
        figures["share"] += [abs(predicted - due_at) / step_s for _, predicted in self._predicted]
        for trainer in self._in_steps():
            if trainer.peer_id in self._began:
                at, samples = self._began[trainer.peer_id]
                figures["samples"].append(samples / self._target - 1)
                figures["late"].append(at > due_at + LATE_SHARE * step_s)
            elif trainer.peer_id in self._roles:
                figures["late"].append(True)

    # records

    def _publish_news(self, trainer: Trainer) -> None:
        now = self._loop.now
        published, at = cast(Any, trainer.published) or (None, -math.inf)
        if published is not None:
            eta_s = max(self._target - self._samples, 0) / (self._target / self._step_s)
            is_near = eta_s <= max(trainer.batch_s, 2 * CONFIG.min_refresh_s)
            is_due = now >= at + published.ttl_s / KEEP_ALIVES
            own = self._record(trainer)
            if not is_due and not is_news(published, now - at, own, self._target, self._num_peers, is_near):
                return
        self._publish(trainer)

    def _publish(self, trainer: Trainer) -> None:
        if not trainer.is_alive:
            return
        record = self._record(trainer)
        trainer.published = record, self._loop.now
        value = msgspec.to_builtins(record, builtin_types=(bytes,))
        self._holders.store(trainer.peer_id, value, record.ttl_s)

    def _record(self, trainer: Trainer) -> PeerRecord:
        is_new = not trainer.is_trained
        return PeerRecord(
            self._position, False, [trainer.address, f"/ip4/192.168.1.7/tcp/31337/p2p/{trainer.peer_id}"],
            CONFIG.ttl_s * self._factor, trainer.seat, trainer.sketch if not is_new else b"", self._step,
            samples=trainer.samples, samples_per_second=0.0 if is_new else trainer.speed,
            lineage_samples=self._step * self._target, counted_s_ago=self._loop.now - trainer.counted_at,
            batch_s=trainer.batch_s if not is_new else 0.0, began_at=trainer.began_at,
        )  # fmt: skip

    # observers

    def _observe(self, trainer: Trainer) -> None:
        """Give a trainer a tracker. Those of the first observer and of newcomers check each signature themselves."""
        endpoint = cast(Endpoint, StandInEndpoint(trainer.peer_id, trainer.address))
        rng = random.Random(self._rng.random())
        line = Line(self._holders, rng)
        own: ProgressTracker
        node = StandInNode(self._holders, line, trainer.identity, rng, lambda: own.roster().members)
        own = ProgressTracker(
            endpoint, cast(DhtNode, node), RUN_ID, self._target, self._position, CONFIG, is_auxiliary=False,
            began_at=trainer.began_at, salt=rng.randbytes(16),
        )  # fmt: skip
        own.roster = lambda: self._roster if trainer.is_trained else Roster()
        own.branches.belief.roster = lambda: own.roster()
        own.branches.is_joining = False
        trainer.tracker, trainer.line = own, line
        verdicts = Verdicts()
        for name in ("refresh", "refresh_part"):
            setattr(own, name, self._timed(getattr(own, name), trainer, verdicts))

    def _timed(self, read: Callable[..., Coroutine[Any, Any, None]], trainer: Trainer, verdicts: Verdicts) -> Any:
        async def timed(*args: Any, **options: Any) -> None:
            reading, before = Timed(read(*args, **options), verdicts), verdicts.num_checks
            try:
                await reading
            finally:
                trainer.predicting_s += reading.took_s + (verdicts.num_checks - before) * self._holders.check_s

        return timed

    def _take_used(self) -> None:
        """Count what the observers have used since the last step, by their roles in it."""
        seconds, self._roles_since = self._loop.now - self._roles_since, self._loop.now
        for trainer in self._observers:
            line = cast(Line, trainer.line)
            used = self._used[self._roles.get(trainer.peer_id, "newcomer")]
            used.seconds += seconds
            used.num_bytes += line.num_bytes
            used.cpu_s += trainer.predicting_s + line.decoding_s
            used.serving_s += line.serving_s
            used.num_reads += line.num_reads
            line.num_bytes = line.num_reads = 0
            line.decoding_s = line.serving_s = trainer.predicting_s = 0.0

    # churn

    async def _churn(self) -> None:
        per_s = self._num_peers * self._churn_per_min / 60
        watched = set(map(id, self._observers))
        while per_s > 0:
            await asyncio.sleep(1 / per_s)
            index = self._rng.randrange(len(self._trainers))
            trainer = self._trainers[index]
            if id(trainer) in watched:
                continue
            trainer.is_alive = trainer.is_trained = False
            self._samples -= trainer.samples
            if self._rng.random() < 0.5:
                self._holders.store(trainer.peer_id, GOODBYE, CONFIG.ttl_s * self._factor)
            newcomer = self._trainers[index] = Trainer(self._num_made, self._rng, self._holders)
            self._num_made += 1
            newcomer.seat, newcomer.counted_at = trainer.seat, self._loop.now
            guests = sum(self._roles.get(one.peer_id, "newcomer") in ("guest", "newcomer") for one in self._observers)
            if self._is_measured and guests < NUM_GUESTS:
                watched.add(id(newcomer))
                self._observe(newcomer)
                self._observers.append(newcomer)
            self._begin_task(self._join(newcomer))

    async def _join(self, trainer: Trainer) -> None:
        """A newcomer finds the run, loads the state, and trains."""
        own = trainer.tracker
        if own is None:
            self._publish(trainer)
        else:
            await own.find_place()
        await asyncio.sleep(JOINS_S)
        if not trainer.is_alive:
            return
        trainer.is_trained, trainer.counted_at = True, self._loop.now
        if own is None:
            self._publish(trainer)
        else:
            own.load(self._position, self._step * self._target)
            if self._layout.sides:
                own.sit(trainer.seat)
            await own.look(for_place=True)
            own.start()
        if self._computes:
            self._begin_batches(trainer)

    # the row

    def _row(self) -> dict[str, Any]:
        self._take_used()
        seconds = self._loop.now - self._measured_from
        num, used, figures = self._num_peers, self._used, self._figures
        num_bytes = self._holders.num_bytes
        # the share of all peers that each role has; a newcomer is one until its first step
        shares = {"leader": 1 / num, "deputy": (NUM_LEADERS - 1) / num, "guest": 0.0, "newcomer": 0.0}
        if self._churn_per_min:
            shares["newcomer"] = self._churn_per_min * used["newcomer"].seconds / 60 / max(self._num_newcomers(), 1)
            shares["guest"] = max(statistics.mean(self._guest_shares[-self._num_steps :]) - shares["newcomer"], 0.0)
        shares["member"] = 1 - sum(shares.values())

        def mean(name: str) -> float:
            return sum(
                share * float(getattr(used[role], name)) / max(used[role].seconds, 1.0)
                for role, share in shares.items()
            )

        published = NUM_HOLDERS * (num_bytes["published"] + num_bytes["confirmed"]) / num / seconds
        stored_s = self._holders.serving_s / num / seconds
        own_s = mean("cpu_s") + self._holders.issue_s * num_bytes["publications"] / num / seconds
        served = mean("num_bytes") * num / NUM_HOLDERS
        row: dict[str, Any] = self._head | {
            "bytes_per_s": round(mean("num_bytes") + published),
            "cpu_share": round(own_s + mean("serving_s") + stored_s, 5),
            "eta_error_s": round(statistics.mean(figures["eta"]), 2),
            "eta_error": round(statistics.mean(figures["share"]), 3),
            "samples_error": round(statistics.mean(map(abs, figures["samples"])), 3),
            "samples_bias": round(statistics.mean(figures["samples"]), 3),
            "late_steps": round(statistics.mean(figures["late"]), 3),
            "busiest_bytes_per_s": round(served + num_bytes["published"] / seconds),
            "busiest_cpu_share": round(own_s + (mean("serving_s") + stored_s) * num / NUM_HOLDERS, 4),
            "publishing_bytes_per_s": round(published),
        }
        for role, one in used.items():
            if one.seconds:
                row[f"{role}_reads_bytes_per_s"] = round(one.num_bytes / one.seconds)
        row["reads_per_step"] = round(used["member"].num_reads * seconds / used["member"].seconds / self._num_steps, 1)
        row["published_per_step"] = round(num_bytes["publications"] / num / self._num_steps, 1)
        row["guests"] = round(shares["guest"] + shares["newcomer"], 3)
        row["step_s"] = round(statistics.mean(figures["step"]), 1)
        return row

    def _num_newcomers(self) -> int:
        return len(self._observers) - self._num_leading - NUM_MEMBERS


def measure(num_peers: int, churn: float, reads: str, options: Any) -> dict[str, Any]:
    """The row of one run, simulated in a process of its own."""
    arguments = (num_peers, churn, reads, options.step_s, options.steps, options.max_group_size, options.seed)
    with Worker(Simulation, *arguments) as simulation:
        row: dict[str, Any] = simulation.call("run", timeout_s=24 * 3600.0)
    return row


def sizes_of(text: str) -> list[int]:
    """Numbers of peers, separated by commas."""
    return [max(2, positive_int(part.strip())) for part in text.split(",")]


WAYS = ("all", "part")


def shares_of(text: str) -> list[float]:
    """Shares from 0 to 1, separated by commas."""
    shares = [0.0 if part.strip() in ("0", "0.0") else positive(part.strip()) for part in text.split(",")]
    if max(shares) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a share above 1; for example 0,0.1")
    return shares


def reads_of(text: str) -> list[str]:
    """Ways of reading, separated by commas."""
    ways = text.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no way of reading; there are {', '.join(WAYS)}")
    return ways


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--peers", type=sizes_of, default=[50, 200, 1000, 2000], help="(default: 50,200,1000,2000)")
    parser.add_argument("--churn", type=shares_of, default=[0.0, 0.1], help="replaced in a minute (default: 0,0.1)")
    parser.add_argument("--reads", type=reads_of, default=list(WAYS), help="(default: all,part)")
    parser.add_argument("--step-s", type=positive, default=60.0, help="of computing for a step (default: 60)")
    parser.add_argument("--steps", type=positive_int, default=10, help="that are measured (default: 10)")
    parser.add_argument("--max-group-size", type=positive_int, default=4096, help="(default: 4096, one group)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args()
    rows = []
    for num_peers in options.peers:
        for churn in options.churn:
            for reads in options.reads:
                rows.append(measure(num_peers, churn, reads, options))
                print(json.dumps(rows[-1]), flush=True)
                write_json(options.json, rows)


if __name__ == "__main__":
    run(main)
