"""Peers behind firewalls and routers in the simulated network: their ways to each other, and what they reduce."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics

import pytest
import torch

from manyhands.averaging.round.times import ROUND_TRIPS
from manyhands.averaging.timing import LOOK_S
from manyhands.base.address import Address
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint, RpcConfig
from manyhands.rpc.ways import PUNCHED, Way, relayed_by
from manyhands.testing import World
from manyhands.testing.host import Host
from manyhands.transport import Stream
from tests.network import ECHO, Text, serve_echo
from tests.simulation.swarm_of_trainers import BATCH_S, PLAIN, Member, Swarm, together
from tests.smaller import smaller
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

LATENCY_S = 0.03
WIDTH = 200
STEPS = 8
LAST_STEP = 28


async def endpoint_behind(router: str, host: Host, world: World) -> Endpoint:
    """An endpoint behind a router, in client mode; one behind ``none`` listens, and relays bulk streams too."""
    host.router = router  # type: ignore[assignment]
    is_client = router != "none"
    endpoint = Endpoint(
        world.transport(host), client_mode=is_client, config=RpcConfig(relay_mbit_s=None if is_client else 100.0),
        rng=world.rng(f"endpoint of {host.name}"),
    )  # fmt: skip
    serve_echo(endpoint)
    if not is_client:
        await endpoint.listen([Address.of(host.ip, 0)])
    return endpoint


@pytest.mark.parametrize(
    ("one", "other", "is_punched"),
    few_of(
        [
            ("port-preserving", "port-preserving", True),
            ("firewall", "port-preserving", True),
            ("port-preserving", "firewall", True),
            ("firewall", "firewall", True),
            ("symmetric", "port-preserving", False),
            ("port-preserving", "symmetric", False),
            ("symmetric", "firewall", False),
            ("symmetric", "symmetric", False),
        ],
        8,
    ),
)
def test_two_peers_that_cannot_be_dialled_find_the_best_way_to_each_other(
    one: str, other: str, is_punched: bool
) -> None:
    world = World(1)
    world.network.default_link.latency_s = LATENCY_S
    endpoints: dict[str, Endpoint] = {}
    came: dict[str, float] = {}
    ways: dict[tuple[str, PeerId], Way | None] = {}

    def program(router: str, *, begins_s: float) -> object:
        async def run(host: Host) -> None:
            endpoint = endpoints[host.name] = await endpoint_behind(router, host, world)
            await asyncio.sleep(begins_s)
            if endpoint.client_mode:
                await endpoint.connect(endpoints["relay"].addresses[0])
            if host.name == "caller":
                await asyncio.sleep(1.0)
                began = asyncio.get_running_loop().time()
                await endpoint.call(endpoints["target"].peer_id, ECHO, Text("hello"))
                came["relayed"] = asyncio.get_running_loop().time() - began
                while is_punched and endpoint.way_to(endpoints["target"].peer_id) != PUNCHED:
                    await asyncio.sleep(0.01)
                came["punched"] = asyncio.get_running_loop().time() - began
            await asyncio.sleep(12.0 - asyncio.get_running_loop().time())
            for peer in endpoints.values():
                ways[host.name, peer.peer_id] = endpoint.way_to(peer.peer_id)
            await asyncio.sleep(1.0)
            await endpoint.close()

        return run

    for name, router in (("relay", "none"), ("target", other), ("caller", one)):
        world.start(name, program(router, begins_s=0.0 if name == "relay" else 0.1))  # type: ignore[arg-type]
    world.run(20.0)
    caller, target, relay = (endpoints[name].peer_id for name in ("caller", "target", "relay"))
    expected = PUNCHED if is_punched else relayed_by(relay)
    assert ways["caller", target] == expected
    assert ways["target", caller] == expected
    assert came["relayed"] < 1.0
    if is_punched:
        assert came["punched"] < 2.0, "within 2 s of the first need"
        assert came["punched"] - came["relayed"] < 6 * 2 * LATENCY_S, "two of these through the relay, to agree on it"


def test_a_relayed_peer_that_announces_an_address_is_not_looked_for_at_the_relay() -> None:
    """It announces an address in its own network; the relay alone sees where its connections come from."""
    world = World(1)
    world.network.default_link.latency_s = LATENCY_S
    endpoints: dict[str, Endpoint] = {}
    known: list[str] = []

    async def run(host: Host) -> None:
        endpoint = endpoints[host.name] = await endpoint_behind(
            "none" if host.name == "relay" else "symmetric", host, world
        )
        if endpoint.client_mode:
            await asyncio.sleep(0.1)
            await endpoint.connect(endpoints["relay"].addresses[0])
        if host.name == "caller":
            await asyncio.sleep(1.0)
            target = endpoints["target"]
            await endpoint.call(target.peer_id, ECHO, Text("hello"))
            target.announce([Address.parse("/ip4/192.168.7.7/tcp/31337")])
            target.set_client_mode(is_on=False)
            await asyncio.sleep(2.0)
            known.extend(str(address.host) for address in endpoint.addresses_of(target.peer_id))
        await asyncio.sleep(8.0 - asyncio.get_running_loop().time())
        await endpoint.close()

    for name in ("relay", "target", "caller"):
        world.start(name, run)
    world.run(20.0)
    assert known == ["192.168.7.7"]


@pytest.mark.parametrize("num_silent", [0, 1])
def test_one_of_three_relays_is_enough_on_long_lines(num_silent: int) -> None:
    """Some 12 trips of 0.1 s lead to a relayed connection: more than a third of the time that callers have."""
    world = World(1)
    world.network.default_link.latency_s = 0.1
    endpoints: dict[str, Endpoint] = {}
    came_s: list[float] = []

    async def run(host: Host) -> None:
        endpoint = endpoints[host.name] = await endpoint_behind(
            "none" if host.name in relays else "symmetric", host, world
        )
        if endpoint.client_mode:
            await asyncio.sleep(0.1)
            for relay in relays:
                await endpoint.connect(endpoints[relay].addresses[0])
        if host.name == "caller":
            await asyncio.sleep(2.0)
            for relay in relays[:num_silent]:
                world.freeze(relay)
            began = asyncio.get_running_loop().time()
            await endpoint.call(endpoints["target"].peer_id, ECHO, Text("hello"))
            came_s.append(asyncio.get_running_loop().time() - began)
        await asyncio.sleep(12.0 - asyncio.get_running_loop().time())
        await endpoint.close()

    relays = ["relay 0", "relay 1", "relay 2"]
    for name in (*relays, "target", "caller"):
        world.start(name, run)
    world.run(20.0)
    assert came_s[0] < 3.0 + 5.0 / 3 * num_silent


@pytest.mark.parametrize("router", ["none", "firewall"])
@pytest.mark.parametrize("latency_s", [0.02, 0.1])
def test_a_stream_to_a_peer_that_dialled_first_opens_within_the_time_of_a_hurried_member(
    router: str, latency_s: float
) -> None:
    """By a dial, or by asking the peer to dial back, if a firewall drops the dial."""
    world = World(1)
    world.network.default_link.latency_s, world.network.default_link.jitter_s = latency_s, latency_s / 8
    endpoints: dict[str, Endpoint] = {}
    kinds: list[str] = []

    async def accept(remote: PeerId, header: bytes, stream: Stream) -> None:
        await stream.close()

    async def run(host: Host) -> None:
        endpoint = endpoints[host.name] = Endpoint(world.transport(host), rng=world.rng(host.name))
        await endpoint.listen([Address.of(host.ip, 0)])
        endpoint.accept_bulk("test", accept)
        if host.name == "first":
            host.router = router  # type: ignore[assignment]
            await asyncio.sleep(0.1)
            await endpoint.connect(endpoints["other"].addresses[0])
        await asyncio.sleep(5.0)
        if host.name == "other":
            first = endpoints["first"].peer_id
            within_s = max(ROUND_TRIPS * endpoint.rtt_s(first), LOOK_S)
            endpoint.release(await endpoint.open_bulk(first, "test", b"", within_s))
            kinds.append("opened")
        await asyncio.sleep(5.0)
        await endpoint.close()

    for name in ("other", "first"):
        world.start(name, run)
    world.run(20.0)
    assert kinds == ["opened"]


def sent_by(swarm: Swarm) -> dict[str, int]:
    return {name: member.peer.presence.endpoint.bytes_sent for name, member in swarm.members.items()}


@pytest.mark.parametrize(
    ("router", "mbit_s", "is_shared"),
    [("port-preserving", math.inf, True), ("port-preserving", 4.0, True), ("symmetric", math.inf, False)],
)
def test_peers_behind_routers_that_keep_ports_share_the_work_of_the_public_one(
    router: str, mbit_s: float, is_shared: bool
) -> None:
    """Also if at first, when the public peer reduces for all, its own line is what holds the others up."""
    swarm = Swarm(3)
    is_slow = mbit_s < math.inf
    width = 2 * WIDTH if is_slow else WIDTH
    names = ["public", *(f"client {number}" for number in range(8 if is_slow else 3))]
    before: dict[str, int] = {}
    groups: dict[str, list[PeerId]] = {}

    def train(member: Member) -> None:
        together(len(names), member)
        while member.optimizer.global_step < STEPS:
            if member.optimizer.global_step == STEPS // 2 and member.name not in before:
                before[member.name] = member.peer.presence.endpoint.bytes_sent
            loss = member.model(torch.ones(4, width)).square().mean()
            member.step(loss, BATCH_S, batch_size=4)
            member.check_samples()
        last = member.optimizer.last_round
        assert last is not None
        groups[member.name] = sorted(last.contributors())
        before[member.name] = member.peer.presence.endpoint.bytes_sent - before[member.name]
        member.optimizer.wait_for_others()

    for number, name in enumerate(names):
        swarm.start_behind(
            router if number else "none", name, width, train, mbit_s=mbit_s, begins_s=0.5 * number,
            target_batch_size=8 * len(names), averaging=PLAIN,
        )  # fmt: skip
    with smaller(span_numel=256):
        swarm.run()
    assert all(len(group) == len(names) for group in groups.values()), "all contribute to the last step"
    clients = [before[name] for name in names[1:]]
    if is_shared:
        assert before["public"] < 1.3 * max(clients), "its bytes are those of any other"
    else:
        assert before["public"] > 2.0 * max(clients), "it reduces for all"


def test_a_newcomer_behind_a_router_has_met_the_other_clients_before_its_first_round() -> None:
    """Else the public peer would reduce for all in that round."""
    swarm = Swarm(6)
    names = ["public", "one", "two", "three", "newcomer"]
    sent: list[int] = []
    together_from: list[int] = []

    def train(member: Member) -> None:
        if member.name != "newcomer":
            together(len(names) - 1, member)
        while member.optimizer.global_step < 3 * STEPS:
            before = member.optimizer.global_step
            member.step(member.model(torch.ones(4, WIDTH)).square().mean(), BATCH_S, batch_size=4)
            member.check_samples()
            last = member.optimizer.last_round
            if member.name == "public" and member.optimizer.global_step > before:
                assert last is not None
                sent.append(member.peer.presence.endpoint.bytes_sent)
                if len(last.members) == len(names):
                    together_from.append(len(sent))
        member.optimizer.wait_for_others()

    for number, name in enumerate(names):
        swarm.start_behind(
            "port-preserving" if number else "none", name, WIDTH, train,
            begins_s=40.0 if name == "newcomer" else 0.5 * number, target_batch_size=128, averaging=PLAIN,
        )  # fmt: skip
    with smaller(span_numel=256):
        swarm.run()
    in_step = [after - before for before, after in itertools.pairwise(sent)]
    first = together_from[0]
    assert 6 < first < 2 * STEPS
    assert max(in_step[first - 2 :]) < 2.0 * statistics.median(in_step), "one of them also gives it the state"


def test_of_many_clients_a_few_share_the_work_of_the_public_peer() -> None:
    """Each client is connected to these few, and need not be to the others."""
    swarm = Swarm(5)
    clients = ["one", "two", "three", "four", "five"]
    sent: dict[str, int] = {}
    met: dict[str, set[str]] = {}

    def train(member: Member) -> None:
        together(1 + len(clients), member)
        endpoint = member.peer.presence.endpoint
        while member.optimizer.global_step < 2 * STEPS:
            if member.optimizer.global_step == STEPS and member.name not in sent:
                sent[member.name] = endpoint.bytes_sent
            member.step(member.model(torch.ones(4, WIDTH)).square().mean(), BATCH_S, batch_size=4)
            member.check_samples()
        last = member.optimizer.last_round
        assert last is not None
        assert len(last.contributors()) == 1 + len(clients), "all contribute to the last step"
        sent[member.name] = endpoint.bytes_sent - sent[member.name]
        ids = {name: one.peer.presence.endpoint.peer_id for name, one in swarm.members.items()}
        met[member.name] = {name for name in clients if endpoint.way_to(ids[name]) is not None}
        member.optimizer.wait_for_others()

    for number, name in enumerate(["public", *clients]):
        swarm.start_behind(
            "port-preserving" if number else "none", name, WIDTH, train, begins_s=0.5 * number, target_batch_size=48,
            averaging=PLAIN,
        )  # fmt: skip
    with smaller(span_numel=256, reducing_clients=2):
        swarm.run()
    few = sorted(clients, key=lambda name: swarm.members[name].peer.presence.endpoint.peer_id)[:2]
    for name in few:
        assert met[name] == set(clients) - {name}
        assert sent["public"] < 1.3 * sent[name], "its bytes are those of the clients that reduce"
    assert min(sent.values()) < 0.6 * sent["public"]


@pytest.mark.long
@pytest.mark.parametrize("num_coordinators", few_of([1, 2], 1, pytest.mark.long))
def test_a_peer_that_can_dial_only_coordinators_takes_part_in_every_step_of_a_run_under_way(
    num_coordinators: int,
) -> None:
    """As behind a firewall that lets connections to port 443 out: no trainer listens there."""
    swarm = Swarm(4)
    doors = [swarm.start_coordinator(f"coordinator{number}") for number in range(num_coordinators)]
    trainers = ["one", "two"]
    first_step: list[int] = []
    groups: dict[int, int] = {}

    def train(member: Member) -> None:
        if member.name == "newcomer":
            first_step.append(member.optimizer.global_step)
        while member.optimizer.global_step < LAST_STEP:
            before = member.optimizer.last_round
            member.step(member.model(torch.ones(4, WIDTH)).square().mean(), BATCH_S, batch_size=4)
            member.check_samples()
            if member.name == "one" and (last := member.optimizer.last_round) is not before and last is not None:
                groups[member.optimizer.global_step] = len(last.contributors())

    for number, name in enumerate([*trainers, "newcomer"]):
        is_newcomer = name == "newcomer"
        swarm.start(
            name,
            lambda: torch.nn.Linear(WIDTH, WIDTH),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
            train,
            client_mode=is_newcomer,
            begins_s=30.0 if is_newcomer else 1.0 + number,
            initial_peers=list(doors),
            target_batch_size=32,
        )
    swarm.world.host("newcomer").router = "firewall"
    for name in trainers:
        swarm.world.network.block("newcomer", name)
    swarm.run()
    assert first_step[0] > 0, "it has loaded the state of the run"
    later = [groups[step] for step in range(first_step[0] + 2, LAST_STEP + 1)]
    assert len(later) >= 8, groups
    assert set(later) == {3}, groups
