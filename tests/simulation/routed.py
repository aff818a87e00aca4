"""Trainers behind routers, two public peers that relay for them, and what becomes of both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from manyhands.base.address import Address
from manyhands.base.errors import PeerError, Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.optimizer import Optimizer
from manyhands.peer import Presence
from manyhands.rpc import Endpoint, RpcConfig
from manyhands.rpc.ways import DIRECT, relayed_by
from manyhands.runtime.tasks import TaskOwner
from manyhands.testing import Fault, Host, World, at
from manyhands.testing.blocking import run_blocking
from manyhands.testing.network import SimPort, SimTransport
from tests.network import ECHO, Text, serve_echo
from tests.simulation.worlds import CountedPeer, Ledger, Trainer, join

RELAYS = ("p0", "p1")
PORT = 31337
RELAY_MBIT_S = 100.0
BATCH_S = 1.0
BATCH_SIZE = 4
TARGET = 96
"""Five trainers take 5 s for it."""
TOUCH_PERIOD_S = 1.0
REPLACED_S = 5.0
"""Seconds until a relay whose process has died is replaced."""
TOUCH_TIMEOUT_S = REPLACED_S
"""With less a call may end just before the new relay has connected the two, and the next comes too late to tell."""
SILENT_S = 10.0
"""Without faults, peers behind routers do not lose each other for so long."""
DOWN_S = 8.0
MOST_PUNCHES = 8
ROUTERS = ("firewall", "port-preserving", "symmetric")


@dataclass
class RoutedRun:
    """A run of peers behind routers.

    Attributes:
        contributed_at: by name, when samples of this trainer were last in a committed round.
        answered_at: by caller and target, when a call last succeeded.
        faults: what a dead relay was not replaced for.
        over_at: when the last fault was over.
    """

    world: World
    names: list[str]
    ledger: Ledger = field(default_factory=Ledger)
    trainers: dict[str, Trainer] = field(default_factory=dict)
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    contributed_at: dict[str, list[float]] = field(default_factory=dict)
    answered_at: dict[tuple[str, str], float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    over_at: float = 0.0
    num_replaced: int = 0
    on_punch: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Draw the routers, and start all peers."""
        rng = self.world.rng("routers")
        for number, name in enumerate(self.names):
            host = self.world.host(name)
            if name not in RELAYS:
                host.router = rng.choice(ROUTERS if number < len(self.names) - 1 else ("none", *ROUTERS))  # type: ignore[assignment]
        for name in self.names:
            self.world.start(name, self._live)
        self.world.invariant("members of one round hold one result", self.ledger.is_clean, self.ledger.what)
        self.world.invariant("a dead relay is replaced", lambda: not self.faults, lambda: "; ".join(self.faults))

    @property
    def clients(self) -> list[str]:
        """The peers that nobody can dial."""
        return [name for name in self.names if self.world.host(name).router != "none"]

    def _peer_id(self, name: str) -> PeerId:
        return self.world.identity(name).peer_id

    def _initial_peers(self, host: Host) -> list[Address]:
        if host.name == RELAYS[0] and self.world.loop.time() == 0.0:
            return []
        return [Address.of(self.world.host(name).ip, PORT, self._peer_id(name)) for name in RELAYS if name != host.name]

    async def _live(self, host: Host) -> None:
        rng = self.world.rng(f"peer {host.name} from {self.world.loop.time()}")
        is_client = host.router != "none"
        transport = PunchingTransport(self.world, host, lambda: self.on_punch())
        config = RpcConfig(relay_mbit_s=RELAY_MBIT_S if host.name in RELAYS else None)
        presence = Presence(
            transport, client_mode=is_client, rng=rng, wall_clock=host.wall_clock, rpc_config=config
        )  # fmt: skip
        endpoint = self.endpoints[host.name] = presence.endpoint
        tasks = TaskOwner(f"calls of {host.name}")
        serve_echo(endpoint)
        try:
            if not is_client:
                await endpoint.listen([Address.of(host.ip, PORT)])
            await join(presence.dht, self._initial_peers(host))
            if is_client:
                tasks.spawn(self._keep_in_touch(host.name, endpoint), name="keeping in touch")
            await run_blocking(lambda: self._train(CountedPeer(presence, self.ledger), host.name, rng))
        finally:
            await tasks.close()
            await presence.stop()

    async def _keep_in_touch(self, name: str, endpoint: Endpoint) -> None:
        """Call the other clients again and again, those with a lower number."""
        others = [other for other in self.clients if other < name]
        await asyncio.gather(*(self._call_again(name, endpoint, other) for other in others))

    async def _call_again(self, name: str, endpoint: Endpoint, other: str) -> None:
        while True:
            await asyncio.sleep(TOUCH_PERIOD_S)
            with suppress(Unavailable, PeerError):
                await endpoint.call(self._peer_id(other), ECHO, Text("hello"), TOUCH_TIMEOUT_S)
                self.answered_at[name, other] = self.world.loop.time()

    def _train(self, peer: CountedPeer, name: str, rng: random.Random) -> None:
        parameter = torch.nn.Parameter(torch.zeros(8))
        optimizer = Optimizer(
            torch.optim.SGD([parameter], lr=0.1), peer=peer, run_id="routed", target_batch_size=TARGET,
            batch_size_per_step=BATCH_SIZE,
        )  # fmt: skip
        self.trainers[name] = Trainer(optimizer, parameter)
        peer.optimizer = optimizer
        goal = float(name.removeprefix("p"))
        while True:
            peer.sleep(BATCH_S * rng.uniform(0.8, 1.2))
            parameter.grad = (parameter - goal).detach()
            before = optimizer.last_round
            optimizer.step()
            if optimizer.last_round is not None and optimizer.last_round is not before:
                self.ledger.commit(peer.peer_id, optimizer.last_round, optimizer.last_contribution, parameter)
                if optimizer.last_contribution:
                    self.contributed_at.setdefault(name, []).append(peer.time())

    # faults

    def schedule(self, times_s: list[float], *, in_mid_punch: bool) -> None:
        """Draw a fault for each of these times, and perhaps one more while two peers dial each other."""
        rng = self.world.rng("faults")
        for number, time_s in enumerate(times_s):
            name = rng.choice(self.clients)
            fault: Fault
            kind = rng.choice(["reboot", "move", "relay"])
            if kind == "reboot":
                fault = at(time_s).reboot_router(name)
            elif kind == "move":
                fault = at(time_s).move(name, f"10.200.{number}.1")
            else:
                fault = self._kill_fault(time_s, rng.choice(RELAYS))
            self.world.schedule(fault)
        self.over_at = times_s[-1] + DOWN_S
        if in_mid_punch:
            self._kill_in_mid_punch(rng.randint(1, MOST_PUNCHES), rng.choice(RELAYS), rng.uniform(0.0, 0.3))

    def _kill_in_mid_punch(self, number: int, name: str, delay_s: float) -> None:
        left = iter(range(number))

        def punch() -> None:
            if next(left, None) == number - 1:
                self.world.schedule(self._kill_fault(round(self.world.loop.time() + delay_s, 3), name))
                self.over_at = max(self.over_at, self.world.loop.time() + delay_s + DOWN_S)

        self.on_punch = punch

    def _kill_fault(self, time_s: float, name: str) -> Fault:
        def kill() -> None:
            if self.world.host(name).is_alive:
                self._note_relayed(name)
                self.world.kill(name)
                self.world.loop.call_later(DOWN_S, self.world.restart, name)

        kill.__name__ = f"kill {name} for {DOWN_S:g} s"
        return at(time_s).call(kill)

    def _note_relayed(self, relay: str) -> None:
        """Have the pairs that a relay connects looked at some seconds later, if another one can replace it."""
        now = self.world.loop.time()
        (spare,) = (name for name in RELAYS if name != relay)
        for one in self.clients:
            for other in self.clients:
                if other < one and self._is_replaceable(one, other, relay, spare):
                    self.num_replaced += 1
                    self.world.loop.call_later(REPLACED_S, self._check_replaced, one, other, relay, spare, now)

    def _is_replaceable(self, one: str, other: str, relay: str, spare: str) -> bool:
        ends = [self.endpoints[name] for name in (one, other) if name in self.endpoints]
        if len(ends) < 2 or not self.world.host(spare).is_alive:
            return False
        is_relayed = ends[0].way_to(self._peer_id(other)) == relayed_by(self._peer_id(relay))
        return is_relayed and all(end.way_to(self._peer_id(spare)) == DIRECT for end in ends)

    def _check_replaced(self, one: str, other: str, relay: str, spare: str, died_at: float) -> None:
        has_spare = self.world.host(spare).is_alive  # one that died since then is down for longer than this wait
        if has_spare and self.answered_at.get((one, other), 0.0) <= died_at:
            self.faults.append(f"{one} does not reach {other} {REPLACED_S:g} s after {relay} has died")

    # the end

    def check(self, within_s: float) -> None:
        """All train on, at one state, the samples of all count again, and all reach each other."""
        assert set(self.trainers) == set(self.names), sorted(self.trainers)
        steps = {name: trainer.optimizer.global_step for name, trainer in self.trainers.items()}
        assert max(steps.values()) - min(steps.values()) <= 1, steps
        for name in self.names:
            later = [when for when in self.contributed_at.get(name, []) if when > self.over_at]
            assert later, f"no sample of {name} counts after the last fault, at {self.over_at:.1f} s"
            assert later[0] < self.over_at + within_s, f"the samples of {name} count again after {later[0]:.1f} s"
        pairs = [(one, other) for one in self.clients for other in self.clients if other < one]
        silent_since = self.world.loop.time() - SILENT_S
        silent = [pair for pair in pairs if self.answered_at.get(pair, 0.0) < silent_since]
        assert not silent, f"no answer for {SILENT_S:g} s between {silent}"


class PunchingTransport(SimTransport):
    """Tells when it takes a port to dial and be dialled at the same time."""

    def __init__(self, world: World, host: Host, on_punch: Callable[[], None]) -> None:
        super().__init__(world.network, host, world.identity(host.name))
        self._on_punch = on_punch

    def take_port(self) -> SimPort:
        self._on_punch()
        return super().take_port()
