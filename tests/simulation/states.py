"""Donors that hand the state of a run out while it moves on, and newcomers that download it, under faults."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import torch

from manyhands.averaging.messages import Position
from manyhands.averaging.roster import Roster, lineage_of
from manyhands.averaging.state.content import State, StateHeader, state_of
from manyhands.averaging.state.server import StateServer
from manyhands.base.address import Address
from manyhands.base.errors import PeerError, Unavailable
from manyhands.base.parameter_spec import ParameterSpec
from manyhands.optim.manifest import RunManifest
from manyhands.optim.state.catching_up import download_state
from manyhands.optim.state.state import Scalars
from manyhands.rpc import Endpoint
from manyhands.testing import Host, World

NUMEL = 20_000
PORT = 4000
STEP_S = 4.0
PAUSE_S = 3.0
SPECS = [ParameterSpec("weight", (NUMEL,), "float32")]
MANIFEST = RunManifest("manyhands/1", "run", 8, SPECS, [], "SGD", [{"lr": 0.1}], "", "none", {})


@dataclass
class Downloads:
    """What newcomers got.

    Attributes:
        times: when each of them had its last state.
        wrong: what was wrong with any.
    """

    times: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    num_states: int = 0


def weights_at(step: int, *, is_odd: bool) -> torch.Tensor:
    """The parameters of a step; on a machine of another kind the last bits differ."""
    weights = torch.rand(NUMEL, generator=torch.Generator().manual_seed(step))
    return weights * (1 + 1e-7) if is_odd else weights


def start_states(world: World, donors: list[str], odd: list[str], newcomers: list[str]) -> Downloads:
    """Start all hosts. The run makes a step every few seconds, on all donors at the same time.

    Args:
        odd: donors whose machine rounds in another way.
    """
    downloads = Downloads()
    addresses = {world.identity(name).peer_id: Address.of(world.host(name).ip, PORT) for name in donors}

    def position() -> Position:
        return Position(int(world.loop.time() / STEP_S), lineage_of(b"", Roster()))

    def capture(*, is_odd: bool) -> State:
        at = position()
        scalars = msgspec.msgpack.encode(Scalars({}, [{"lr": 0.1}], {}))
        header = StateHeader(at, at.step, SPECS, scalars, b"")
        return state_of(header, [weights_at(at.step, is_odd=is_odd)])

    async def donate(host: Host) -> None:
        endpoint = Endpoint(world.transport(host), rng=world.rng(f"endpoint of {host.name}"))
        server = StateServer(endpoint, "run", lambda: capture(is_odd=host.name in odd), position)
        try:
            await endpoint.listen([Address.of(host.ip, PORT)])
            await asyncio.Event().wait()
        finally:
            await server.close()
            await endpoint.close()

    async def download(host: Host) -> None:
        rng = world.rng(f"newcomer {host.name} from {world.loop.time()}")
        endpoint = Endpoint(world.transport(host), rng=world.rng(f"endpoint of {host.name}"))
        try:
            while True:
                await asyncio.sleep(rng.uniform(0.0, PAUSE_S))
                for peer_id, address in addresses.items():
                    endpoint.learn(peer_id, [address])
                asked = rng.sample(list(addresses), len(addresses))
                try:
                    state = await download_state(endpoint, MANIFEST, asked, position())
                except (Unavailable, PeerError):  # that is what faults do
                    continue
                step = state.header.position.step
                if not any(torch.equal(state.tensors[0], weights_at(step, is_odd=is_odd)) for is_odd in (False, True)):
                    downloads.wrong.append(f"{host.name} got a state of step {step} that nobody had")
                downloads.times[host.name] = world.loop.time()
                downloads.num_states += 1
        finally:
            await endpoint.close()

    for name in donors:
        world.start(name, donate)
    for name in newcomers:
        world.start(name, download)
    world.invariant(
        "a state is whole, and of one donor or of its equals", lambda: not downloads.wrong, lambda: downloads.wrong
    )
    return downloads
