"""One round in the deterministic world, with a fault at a chosen phase of it."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import struct
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch

from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.allreduce.reducer import SpanReducer
from manyhands.averaging.allreduce.streams import RoundStream
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Group, SpanResult
from manyhands.averaging.rounds import CommittedRound, RoundRunner
from manyhands.base.address import Address
from manyhands.base.errors import RoundAborted
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint
from manyhands.testing import Host, World
from manyhands.testing.lies import replace_reducer
from tests.phases import Connect, Phase, around_connects, change_butterflies, forget, on_phase
from tests.smaller import smaller
from tests.swarm import FixedMeeting

NUMEL = 60_000
NUM_BYTES = 4 * NUMEL
LINK_MBIT_S = 100.0
START_S = 2.0
LATE_S = 0.02
"""The others begin so much later than the one that has a fault."""
CONFIG = AveragingConfig(matchmaking_time_s=4.0, averaging_timeout_s=30.0, codec="none")
BOUND_S = 40.0
"""No call takes longer: the round's 30 s, and what the verdict may need afterwards."""

ROLES = ("sender", "reducer", "leader", "client")
PHASES = (
    "before", "joining", "formed", "first chunk sent", "half sent", "reducing", "before commit", "after commit",
)  # fmt: skip
OF_THE_ROUND = {phase.value: phase for phase in (Phase.FORMED, Phase.VOTING, Phase.CONCLUDED)}
SENT = {"first chunk sent": 0.05, "half sent": 0.5}
"""Of what a member sends to reducers, in vectors."""
RECEIVED = {"reducing": 0.5}


@dataclass
class Outcome:
    """How the call of one member ended.

    Attributes:
        time: virtual seconds since the start.
        result: None if it did not end.
    """

    time: float
    result: CommittedRound | RoundAborted | None

    @property
    def held(self) -> CommittedRound | None:
        """The round, if it committed and this member holds the mean."""
        is_held = isinstance(self.result, CommittedRound) and self.result.averaged_N is not None
        return self.result if is_held and isinstance(self.result, CommittedRound) else None


@dataclass
class RoundWorld:
    """Peers that make one round together; what must be true of it is an invariant of the world.

    Attributes:
        chunk_numel: the largest chunk.
        slow: by name, what a host sends, in megabits per second.
        believes: by name, what it says that it sends, if that is not so.
        stuck: by name, what a member does not do while it still answers calls: ``send`` its values, or ``reduce``. With
            ``unlike`` it sends half of the others other means.
        max_attempts: of each member, as its training loop would make them: the next one follows when one is aborted.
        attempts: by name, how many a member has made.
        group_sizes: by name, members of the first group that a member has found.
        blamed: by name, the ids of the members that its rounds have blamed.
        fault_s, victim: when the fault happened, and to whom.
    """

    num_peers: int
    seed: int = 0
    numel: int = NUMEL
    config: AveragingConfig = CONFIG
    chunk_numel: int = 4096
    latency_s: float = 0.005
    slow: dict[str, float] = field(default_factory=dict)
    believes: dict[str, float] = field(default_factory=dict)
    stuck: dict[str, str] = field(default_factory=dict)
    max_attempts: int = 1
    attempts: Counter[str] = field(default_factory=Counter)
    group_sizes: dict[str, int] = field(default_factory=dict)
    blamed: defaultdict[str, set[PeerId]] = field(default_factory=lambda: defaultdict(set))
    fault_s: float | None = None
    victim: str = ""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    runners: dict[str, RoundRunner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = World(self.seed)
        link = self.world.network.default_link
        link.latency_s, link.jitter_s = self.latency_s, self.latency_s / 5
        names = [f"p{number}" for number in range(self.num_peers)]
        self.ids = {name: self.world.identity(name).peer_id for name in names}
        self.names = sorted(names, key=lambda name: self.ids[name])
        self.weights = {name: float(1 + number % 3) for number, name in enumerate(self.names)}
        self.vectors = {
            name: torch.randn(self.numel, generator=torch.Generator().manual_seed(number))
            for number, name in enumerate(self.names)
        }
        self._addresses: dict[PeerId, list[Address]] = {}
        self._begun: dict[str, float] = {}
        self._committed: dict[bytes, CommittedRound] = {}
        self._hooks: list[Callable[[str, Phase], None]] = []
        self.world.invariant("no two members hold different results", lambda: not self.wrong, lambda: self.wrong)

    def name_of(self, role: str) -> str:
        """Who has a role; the others are reducers too."""
        return {
            "leader": self.names[0], "reducer": self.names[1], "sender": self.names[-2], "client": self.names[-1]
        }[role]  # fmt: skip

    def start(self, first: str = "") -> None:
        """Start all peers; ``first`` begins its round before the others."""
        for name in self.names:
            host = self.world.host(name)
            self.world.network.set_bandwidth(name, up_mbit_s=self.slow.get(name, LINK_MBIT_S), down_mbit_s=LINK_MBIT_S)
            self._begun[name] = START_S if name == first else START_S + LATE_S * self.world.rng(f"late {name}").random()
            assert host.name == name
            self.world.start(name, self._program)

    async def _program(self, host: Host) -> None:
        is_client, is_sender = host.name == self.name_of("client"), host.name == self.name_of("sender")
        endpoint = Endpoint(
            self.world.transport(host), client_mode=is_client, rng=self.world.rng(f"endpoint of {host.name}")
        )
        others = {self.ids[name]: name == self.name_of("client") for name in self.names if name != host.name}
        says_mbit_s = self.believes.get(host.name, 0.1 if is_sender else self.slow.get(host.name, LINK_MBIT_S))
        config = replace(self.config, bandwidth_mbit_s=says_mbit_s)
        roster = FixedMeeting(endpoint, others)
        runner = RoundRunner(endpoint, "simulated", b"", roster, config, self.world.rng(f"round of {host.name}"))
        on_phase(endpoint.peer_id, lambda phase: self._entered(host.name, phase))
        self.runners[host.name] = runner
        find_group = runner.matchmaker.find_group

        async def find_and_note(*arguments: Any, **options: Any) -> Group:
            group = await find_group(*arguments, **options)
            self.group_sizes.setdefault(host.name, len(group.members))
            return group

        runner.matchmaker.find_group = find_and_note  # type: ignore[method-assign]
        if host.name in self.stuck:
            get_stuck(endpoint.peer_id, self.stuck[host.name])
        try:
            if not is_client:
                await endpoint.listen([Address.of(host.ip, 0)])
                self._addresses[endpoint.peer_id] = endpoint.addresses
            await asyncio.sleep(self._begun[host.name] - self.world.loop.time())
            for other, where in self._addresses.items():
                endpoint.learn(other, where)
            self.outcomes[host.name] = Outcome(0.0, None)
            while self.attempts[host.name] < self.max_attempts:
                await self._average(host.name, runner)
                if isinstance(self.outcomes[host.name].result, CommittedRound):
                    break
            await asyncio.sleep(1e6)  # whoever is in doubt may ask
        finally:
            await runner.close()
            await endpoint.close()

    async def _average(self, name: str, runner: RoundRunner) -> None:
        result: CommittedRound | RoundAborted
        self.attempts[name] += 1
        try:
            vector_N, is_in_place = self.vectors[name], self.names.index(name) % 2 == 1
            given_N, refill = (vector_N.clone(), vector_N.clone) if is_in_place else (vector_N, None)
            result = await runner.average(given_N, self.weights[name], refill=refill)
            if result.averaged_N is not None:
                memory_N, result = result.averaged_N, replace(result, averaged_N=result.averaged_N.clone())
                memory_N.zero_()  # it is the caller's now, which may do with it what it likes
        except RoundAborted as error:
            result = error
        self.outcomes[name] = Outcome(self.world.loop.time(), result)
        self.blamed[name].update(result.blamed)
        if isinstance(result, CommittedRound):
            self._check(name, result)

    def _check(self, name: str, result: CommittedRound) -> None:
        first = self._committed.setdefault(result.manifest.group_id, result)
        if first.manifest != result.manifest:
            self.wrong.append(f"{name} committed another manifest")
        if result.averaged_N is None:
            return
        if first.averaged_N is not None and not torch.equal(first.averaged_N, result.averaged_N):
            self.wrong.append(f"{name} holds another mean")
        if first.averaged_N is not None and first is not result:
            return
        error = numpy.abs(result.averaged_N.numpy() - self.mean_of(result))
        if error.max() > 1e-6:  # of values of the order of 1
            self.wrong.append(f"{name} holds a mean that is not that of its contributors")

    def mean_of(self, result: CommittedRound) -> numpy.ndarray:
        """What the members of a manifest should hold, in float64."""
        manifest = result.manifest
        name_of = {peer_id: name for name, peer_id in self.ids.items()}
        names = [name_of[member] for member in manifest.members]
        mean = numpy.zeros(self.numel)
        for part in manifest.parts or [SpanResult(0, self.numel, 0, [])]:
            weights = {name: self.weights[name] for rank, name in enumerate(names) if rank not in part.absent}
            total = sum(weights.values())
            for name, weight in weights.items():
                mean[part.start : part.stop] += self.vectors[name][part.start : part.stop].numpy() * (weight / total)
        return mean

    # faults

    def leave(self, name: str) -> None:
        """End a member's program, which closes its runner and its endpoint."""
        for task in self.world.host(name).tasks():
            task.cancel()

    def _entered(self, name: str, phase: Phase) -> None:
        for hook in list(self._hooks):
            hook(name, phase)

    def when(self, name: str, phase: str, act: Callable[[], None]) -> None:
        """Call ``act`` once, outside of all hosts, when a member comes to a phase of its round."""
        done: list[bool] = []

        def once() -> None:
            if not done:
                done.append(True)
                self.fault_s = self.world.loop.now
                act()

        if phase == "before":
            self.world.loop.call_outside(START_S - 0.5, once)
        elif phase == "joining":
            self._hooks.append(
                lambda who, entered: self._soon(once) if (who, entered) == (name, Phase.JOINING) else None
            )
        elif phase in OF_THE_ROUND:
            self._hooks.append(lambda who, entered: once() if (who, entered) == (name, OF_THE_ROUND[phase]) else None)
        else:
            self.world.invariant(f"watch {name}", lambda: (self._has_moved(name, phase) and once()) or True)

    def _soon(self, once: Callable[[], None]) -> None:
        self.world.loop.call_outside(self.world.loop.now + 2.5 * self.latency_s, once)

    def _has_moved(self, name: str, phase: str) -> bool:
        if self.world.loop.now < START_S:
            return False
        streams = [stream for stream in self.world.network.streams if stream.host.name == name]
        if phase in SENT:
            return sum(stream.bytes_sent for stream in streams) >= SENT[phase] * 4 * self.numel
        return sum(stream.bytes_received for stream in streams) >= RECEIVED[phase] * 4 * self.numel

    def run(self, duration_s: float = BOUND_S + START_S) -> None:
        """Run it; all programs must stop without a leak."""
        forget()  # what peers of an earlier world did
        with smaller(chunk_numel=self.chunk_numel):
            self.world.run(duration_s, stop_within_s=20.0)

    # what came of it

    def survivors(self, dead: Iterable[str]) -> list[str]:
        """Names of those who have no fault."""
        gone = set(dead)
        return [name for name in self.names if name not in gone]

    def majority_holds(self, names: Iterable[str]) -> bool:
        """Whether more than half of all peers hold the result of one round."""
        held = [self.outcomes[name].held for name in names if name in self.outcomes]
        groups = Counter(round_.manifest.group_id for round_ in held if round_ is not None)
        return 2 * max(groups.values(), default=0) > self.num_peers

    def last_s(self, names: Iterable[str]) -> float:
        """When the last of some members ended its call."""
        return max(self.outcomes[name].time for name in names)


def get_stuck(peer_id: PeerId, what: str) -> None:
    """Have a member stand still in its exchange, where it answers calls all the same."""

    async def stand_still(*_: object) -> None:
        await asyncio.Event().wait()

    async def connect_for_nothing(connect: Connect, *arguments: Any) -> RoundStream:
        stream = await connect(*arguments)
        stream.send = stream.send_each = stand_still  # type: ignore[method-assign,assignment]
        return stream

    if what == "unlike":
        change_butterflies(peer_id, lambda butterfly: send_unlike_means(butterfly, every=2))
    elif what == "send":
        around_connects(peer_id, connect_for_nothing)
    else:
        change_butterflies(peer_id, lambda butterfly: replace_reducer(butterfly, StuckReducer))


class StuckReducer(SpanReducer):
    """Takes the place of one that averages."""

    def __init__(self, honest: SpanReducer) -> None:
        vars(self).update(vars(honest))

    async def run(self) -> AsyncIterator[tuple[int, str]]:
        await asyncio.Event().wait()
        yield 0, ""


class UnlikeReducer(SpanReducer):
    """Takes the place of one that sends all the same; see :func:`send_unlike_means`."""

    def __init__(self, honest: SpanReducer, every: int) -> None:
        vars(self).update(vars(honest))
        self._every = every
        self._num_sent = 0

    def done(self, num_before: int) -> tuple[int, memoryview]:
        num_done, means = super().done(num_before)
        if num_done > num_before:
            self._num_sent += 1
            if self._num_sent % self._every == 1 % self._every:
                means = memoryview(bytearray(means[:-4]) + struct.pack("<f", float(self._num_sent)))
        return num_done, means


def send_unlike_means(butterfly: Butterfly, every: int = 1) -> None:
    """Have a reducer send its partners, or every second one and so on, other means, each its own ones."""
    replace_reducer(butterfly, lambda honest: UnlikeReducer(honest, every))


def random_death(seed: int) -> RoundWorld:
    """A round of 4 or 8 in which one of them, whoever it is, is killed at some moment after the group has formed.

    If it is aborted, the others make one more attempt.
    """
    world = RoundWorld(4 + 4 * (seed % 2), seed, latency_s=(0.001, 0.005, 0.05)[seed % 3], max_attempts=2)
    rng = world.world.rng("death")
    victim = rng.choice(world.names)
    delay_s = rng.uniform(0.0, 0.25 + 10 * world.latency_s)

    def kill_soon() -> None:
        world.fault_s = world.world.loop.now + delay_s
        world.victim = victim
        world.world.loop.call_outside(world.fault_s, world.world.kill, victim)

    world.start()
    world.when(victim, "formed", kill_soon)
    world.run()
    return world


def random_departure(seed: int) -> RoundWorld:
    """A round of five whose leader leaves at some moment after the group has formed; the others attempt it twice."""
    world = RoundWorld(
        5, seed, (60_000, 100, 6000)[seed // 3 % 3], latency_s=(0.02, 0.005, 0.001)[seed % 3], max_attempts=2
    )
    link = world.world.network.default_link
    link.jitter_s = link.latency_s * (0.2, 1.0, 3.0)[seed // 9 % 3]
    rng = world.world.rng("leaving")
    world.victim = world.name_of("leader")
    delay_s = rng.uniform(0.0, 0.01) + rng.uniform(0.0, 8 * link.latency_s)

    def leave_soon() -> None:
        world.fault_s = world.world.loop.now + delay_s
        world.world.loop.call_outside(world.fault_s, world.leave, world.victim)

    world.start(first=world.victim)
    world.when(world.victim, "formed", leave_soon)
    world.run()
    return world


def seconds_after(fault: str, role: str, phase: str, num_peers: int) -> float:
    """Virtual seconds from a member's fault until all others have committed, perhaps in a later attempt."""
    world = RoundWorld(num_peers, max_attempts=3)
    victim = world.name_of(role)
    world.start()
    world.when(victim, phase, lambda: getattr(world.world, fault)(victim))
    world.run(3 * BOUND_S)
    others = world.survivors([victim])
    assert world.fault_s is not None
    assert all(world.outcomes[name].held for name in others)
    return world.last_s(others) - world.fault_s


def main() -> None:
    """Print in what share of rounds with one death the others commit, and how long after it, by who died."""
    parser = argparse.ArgumentParser(description="one death in each of many simulated rounds")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--each", type=int, help="each fault in each phase, of each kind of member of so many")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if options.each:
        for fault, role in itertools.product(("kill", "freeze", "crash"), ROLES):
            each = [f"{phase} {seconds_after(fault, role, phase, options.each):.1f}" for phase in PHASES[2:]]
            print(f"{fault} {role}: {', '.join(each)}")
        return
    deaths: dict[str, list[RoundWorld]] = {"leader": [], "reducer": [], "sender": [], "client": []}
    for seed in range(options.first, options.first + options.rounds):
        world = random_death(seed)
        is_of_all = world.group_sizes.get(world.victim) == world.num_peers
        if is_of_all and world.outcomes[world.victim].result is None:  # else it died after its round, or in another one
            role = next((role for role in deaths if world.name_of(role) == world.victim), "reducer")
            deaths[role].append(world)
            if not world.majority_holds(others := world.survivors([world.victim])):
                print(f"seed {seed}, {role}: {[str(world.outcomes[name].result)[:80] for name in others]}")
    deaths["all"] = [world for worlds in deaths.values() for world in worlds]
    for role, worlds in deaths.items():
        print(f"{role}: {_summary(worlds)}")


def _summary(worlds: list[RoundWorld]) -> str:
    num_held = num_at_once = num_all = 0
    seconds = [0.0]
    for world in worlds:
        others = world.survivors([world.victim])
        is_held = world.majority_holds(others)
        num_held += is_held
        num_at_once += is_held and all(world.attempts[name] == 1 for name in others)
        num_all += all(world.outcomes[name].held for name in others)
        if is_held and world.fault_s is not None:
            seconds.append(max(0.0, world.last_s(others) - world.fault_s))
    seconds.sort()
    num = max(len(worlds), 1)
    return (
        f"{len(worlds)} deaths; more than half hold the mean of that round in {num_at_once / num:.2%}, of that or the "
        f"next one in {num_held / num:.2%}, and all others do in {num_all / num:.2%}; seconds until then: "
        f"p50 {seconds[len(seconds) // 2]:.2f}, p99 {seconds[int(len(seconds) * 0.99)]:.2f}, most {seconds[-1]:.2f}"
    )


if __name__ == "__main__":
    main()
