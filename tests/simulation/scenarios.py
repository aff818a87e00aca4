"""Worlds with faults drawn from their seed, and what must be true at their end: what ``make sim`` explores."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

from manyhands.averaging.state import content as state_module
from manyhands.base.address import Address
from manyhands.base.errors import PeerError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.run.branches import BranchChoice
from manyhands.rpc import Endpoint
from manyhands.testing import Host, World
from manyhands.transport import Stream
from tests.network import ECHO, STUCK, Text, serve_echo
from tests.simulation.averages import start_averages
from tests.simulation.chance import faults, weather
from tests.simulation.local import Setting, check_agreement, start_local
from tests.simulation.rounds import start_rounds
from tests.simulation.routed import RoutedRun
from tests.simulation.states import start_states
from tests.simulation.worlds import start_dht, start_training
from tests.smaller import smaller

STOP_WITHIN_S = 20.0
CALL_TIMEOUT_S = 3.0
CALLS_ONLY_FROM_S = 25.0
BULK_TIMEOUT_S = 10.0
BULK_KIND = "test.bulk"
MAX_BULK_BYTES = 400_000


@dataclass(frozen=True)
class Scenario:
    """A world that is ready to run.

    Attributes:
        duration_s: virtual seconds until its programs are told to stop.
        conclude: asserts what must be true then.
        setting: holds while it runs.
    """

    world: World
    duration_s: float
    conclude: Callable[[], None]
    setting: contextlib.AbstractContextManager[object] = field(default_factory=contextlib.nullcontext)

    def run(self) -> None:
        """Raises what went wrong, if anything did."""
        self.world.at_end(self.conclude)
        with self.setting, nobody_is_shunned():
            self.world.run(self.duration_s, stop_within_s=STOP_WITHIN_S)


@contextlib.contextmanager
def nobody_is_shunned() -> Iterator[None]:
    """All peers of these worlds are honest: none may disbelieve another's state."""
    shunned: list[PeerId] = []
    shun = BranchChoice.shun

    def note_shun(self: BranchChoice, peer_id: PeerId, now: float, reason: str) -> None:
        shunned.append(peer_id)
        shun(self, peer_id, now, reason)

    with mock.patch.object(BranchChoice, "shun", note_shun):
        yield
    assert not shunned, f"honest peers were shunned: {shunned}"


def rpc(seed: int) -> Scenario:
    """Three peers that call, give up and send bulk streams; 25 s after the last fault all calls work."""
    world = World(seed)
    names = ["a", "b", "c"]
    weather(world, names, limit_bandwidth=True)
    world.schedule(*faults(world.rng("faults"), names, start_s=2, stop_s=20, longest_s=8, num_faults=4))
    peers: dict[str, _RpcPeer] = {}
    addresses: dict[PeerId, list[Address]] = {}
    wrong: list[str] = []

    async def program(host: Host) -> None:
        peer = peers[host.name] = _RpcPeer(world, host, addresses, wrong)
        await peer.live()

    for name in names:
        world.start(name, program)
    world.invariant("answers and bulk data are what was asked for", lambda: not wrong, lambda: wrong)

    def conclude() -> None:
        for name, peer in peers.items():
            assert peer.last_good_call_s > 42.0, f"{name} made its last good call at {peer.last_good_call_s:.1f} s"

    return Scenario(world, 45.0, conclude)


def rounds(seed: int) -> Scenario:
    """Four peers that average again and again; half a minute after the last fault all four do so together."""
    world = World(seed)
    names = ["p0", "p1", "p2", "p3"]
    weather(world, names, limit_bandwidth=True)
    world.schedule(*faults(world.rng("faults"), names, start_s=3, stop_s=25, longest_s=12, num_faults=4))
    commits = start_rounds(world, names)

    def conclude() -> None:
        assert len(commits.times) == len(names), commits.times
        for peer_id, (time, num_members) in commits.times.items():
            assert time > 45.0, f"{peer_id} committed last at {time:.1f} s"
            assert num_members == len(names), f"{peer_id} is in a group of {num_members}"

    return Scenario(world, 60.0, conclude, smaller(chunk_numel=4096))


def dht(seed: int) -> Scenario:
    """Five peers of one DHT; a minute after the last fault all see all."""
    world = World(seed)
    names = [f"p{number}" for number in range(5)]
    weather(world, names)
    world.schedule(*faults(world.rng("faults"), names, start_s=5, stop_s=45, longest_s=20, num_faults=3))
    seen = start_dht(world, names)

    def conclude() -> None:
        assert seen == dict.fromkeys(names, len(names)), seen

    return Scenario(world, 110.0, conclude)


def training(seed: int) -> Scenario:
    """Three trainers of one run; a hundred seconds after the last fault all agree, and the run goes on."""
    world = World(seed)
    names = ["p0", "p1", "p2"]
    weather(world, names)
    world.schedule(*faults(world.rng("faults"), names, start_s=10, stop_s=60, longest_s=25, num_faults=3))
    trainers, ledger = start_training(world, names, 2.0, 4, 96)
    rounds_before: list[int] = []
    world.loop.call_at(80.0, lambda: rounds_before.append(ledger.num_rounds))

    def conclude() -> None:
        assert set(trainers) == set(names), sorted(trainers)
        steps = {name: trainer.optimizer.global_step for name, trainer in trainers.items()}
        assert max(steps.values()) - min(steps.values()) <= 1, steps
        assert ledger.num_rounds > rounds_before[0], f"no round was committed after 80 s; steps: {steps}"

    return Scenario(world, 160.0, conclude)


def averages(seed: int) -> Scenario:
    """Four averagers without an optimizer; a minute after the last fault all four are in one round again."""
    world = World(seed)
    names = ["p0", "p1", "p2", "p3"]
    weather(world, names)
    world.schedule(*faults(world.rng("faults"), names, start_s=8, stop_s=50, longest_s=20, num_faults=4))
    done = start_averages(world, names)

    def conclude() -> None:
        assert len(done.times) == len(names), done.times
        for name, (time, num_members) in done.times.items():
            assert time > 100.0, f"{name} committed last at {time:.1f} s"
            assert num_members == len(names), f"{name} is in a group of {num_members}"

    return Scenario(world, 120.0, conclude, smaller(chunk_numel=512))


def state(seed: int) -> Scenario:
    """Four donors, one of another kind; each of three newcomers gets the state again after the last fault."""
    world = World(seed)
    donors, newcomers = ["d0", "d1", "d2", "d3"], ["n0", "n1", "n2"]
    weather(world, [*donors, *newcomers], limit_bandwidth=True)
    world.schedule(
        *faults(world.rng("faults"), [*donors, *newcomers], start_s=2, stop_s=40, longest_s=15, num_faults=6)
    )
    downloads = start_states(world, donors, ["d3"], newcomers)

    def conclude() -> None:
        assert set(downloads.times) == set(newcomers), downloads.times
        for name, time in downloads.times.items():
            assert time > 60.0, f"{name} got a state last at {time:.1f} s"

    return Scenario(world, 90.0, conclude, mock.patch.object(state_module, "CHUNK_BYTES", 8192))


def local(seed: int) -> Scenario:
    """Four peers with local steps, one of which comes late; ninety seconds after the last fault all agree."""
    world = World(seed)
    names = ["p0", "p1", "p2", "p3"]
    weather(world, names)
    rng = world.rng("local steps")
    late = {"p3": rng.uniform(15.0, 45.0)}
    world.schedule(*faults(world.rng("faults"), names[:3], start_s=10, stop_s=60, longest_s=25, num_faults=3))
    trainers, ledger = start_local(world, names, Setting.drawn(rng), late)
    rounds_before: list[int] = []
    world.loop.call_at(80.0, lambda: rounds_before.append(ledger.num_rounds))

    def conclude() -> None:
        assert set(trainers) == set(names), sorted(trainers)
        check_agreement(trainers)
        assert ledger.num_rounds > rounds_before[0], f"no round was committed after 80 s: {ledger.num_rounds}"

    return Scenario(world, 150.0, conclude)


def routers(seed: int) -> Scenario:
    """Five trainers, two of which relay for those behind routers, which reach each other in the end.

    40 s after the last fault all samples count.
    """
    world = World(seed)
    names = [f"p{number}" for number in range(5)]
    weather(world, names)
    run = RoutedRun(world, names)
    run.start()
    rng = world.rng("times")
    times = [round(start + rng.uniform(0.0, 10.0), 3) for start in (25.0, 60.0, 95.0)]
    run.schedule(times, in_mid_punch=rng.random() < 0.5)
    return Scenario(world, 165.0, lambda: run.check(40.0))


SCENARIOS: dict[str, Callable[[int], Scenario]] = {
    "rpc": rpc, "rounds": rounds, "averages": averages, "dht": dht, "training": training, "state": state,
    "local": local, "routers": routers,
}  # fmt: skip


class _RpcPeer:
    """Calls others at random, and keeps score."""

    def __init__(self, world: World, host: Host, addresses: dict[PeerId, list[Address]], wrong: list[str]) -> None:
        self.last_good_call_s = 0.0
        self._loop = world.loop
        self._host = host
        self._rng: random.Random = world.rng(f"calls of {host.name} from {world.loop.time()}")
        self._addresses = addresses
        self._wrong = wrong
        self._endpoint = Endpoint(world.transport(host), rng=world.rng(f"endpoint of {host.name}"))

    async def live(self) -> None:
        endpoint = self._endpoint
        serve_echo(endpoint)
        endpoint.handle(STUCK, self._stay)
        endpoint.accept_bulk(BULK_KIND, self._take_bulk)
        try:
            await endpoint.listen([Address.of(self._host.ip, 0)])
            self._addresses[endpoint.peer_id] = endpoint.addresses
            while True:
                await asyncio.sleep(self._rng.expovariate(4.0))
                await self._act()
        finally:
            await endpoint.close()

    async def _act(self) -> None:
        others = [peer_id for peer_id in self._addresses if peer_id != self._endpoint.peer_id]
        if not others:
            return
        other = self._rng.choice(others)
        self._endpoint.learn(other, self._addresses[other])
        is_over = self._loop.time() > CALLS_ONLY_FROM_S
        action = self._rng.choices([self._call, self._give_up, self._send_bulk], [6, 2 - 2 * is_over, 1 - is_over])[0]
        with contextlib.suppress(Unavailable, PeerError):  # that is what faults do
            await action(other)

    async def _call(self, other: PeerId) -> None:
        text = f"{self._rng.random()}" * self._rng.choice([1, 100])
        answer = await self._endpoint.call(other, ECHO, Text(text), CALL_TIMEOUT_S)
        if answer.text != f"{text} from {other}":
            self._wrong.append(answer.text)
        self.last_good_call_s = self._loop.time()

    async def _give_up(self, other: PeerId) -> None:
        calling = asyncio.ensure_future(self._endpoint.call(other, STUCK, Text("hi"), CALL_TIMEOUT_S))
        await asyncio.wait([calling], timeout=self._rng.uniform(0.0, 0.5))
        calling.cancel()
        await asyncio.wait([calling])

    async def _stay(self, remote: PeerId, request: Text) -> Text:
        await asyncio.sleep(1e6)
        return request

    async def _send_bulk(self, other: PeerId) -> None:
        data = self._rng.randbytes(self._rng.randint(1, MAX_BULK_BYTES))
        header = hashlib.sha256(data).digest() + len(data).to_bytes(4, "big")
        stream = await self._endpoint.open_bulk(other, BULK_KIND, header, CALL_TIMEOUT_S)
        try:
            await asyncio.wait_for(self._exchange(stream, data), BULK_TIMEOUT_S)
        except asyncio.TimeoutError:
            pass
        finally:
            self._endpoint.release(stream)

    async def _exchange(self, stream: Stream, data: bytes) -> None:
        await stream.send(data)
        await stream.receive_into(memoryview(bytearray(1)))

    async def _take_bulk(self, remote: PeerId, header: bytes, stream: Stream) -> None:
        data = bytearray(int.from_bytes(header[32:], "big"))
        await stream.receive_into(memoryview(data))
        if hashlib.sha256(data).digest() != header[:32]:
            self._wrong.append(f"{len(data)} bytes from {remote}")
        await stream.send(b"!")
        await stream.wait_closed()
