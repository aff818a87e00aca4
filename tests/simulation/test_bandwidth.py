"""Peers find out how fast their uplinks are, and share the work out by that."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
import torch

from manyhands.averaging.averager_presence import next_position
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.rounds import RoundMeter, RoundRunner
from manyhands.base.address import Address
from manyhands.rpc import Endpoint, RpcConfig
from manyhands.testing import Host, World
from tests.phases import rounds_of
from tests.swarm import FixedMeeting
from tests.sweeps import few_of

NUMEL = 2_000_000
VECTOR_MBIT = NUMEL * 32 / 1e6
HEARTBEAT_S = 0.1
FAR_S = 0.02
"""One way between peers that are far from each other: the system tells what their streams did."""


class Measured:
    """What came of the rounds.

    Attributes:
        seconds: of each round.
        mbit_s: what the members believe of their uplinks in the last round.
        owned: what fraction of the vector each reduced, by round.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.mbit_s: dict[str, float] = {}
        self.owned: list[dict[str, float]] = []


def run_rounds(
    num_rounds: int,
    up_mbit_s: dict[str, float],
    declared: dict[str, float] | None = None,
    *,
    latency_s: float = 0.0005,
    down_mbit_s: float | None = 1000.0,
    changes: dict[int, dict[str, float]] | None = None,
) -> Measured:
    """Rounds one after the other.

    Args:
        down_mbit_s: None if each receives as fast as it sends.
        changes: bandwidths that some have from a round on.
    """
    world, measured = World(1), Measured()
    world.network.default_link.latency_s = latency_s
    measured.owned = [{} for _ in range(num_rounds)]
    ids = {name: world.identity(name).peer_id for name in up_mbit_s}
    endpoints: list[Endpoint] = []

    def limit(name: str, mbit_s: float) -> None:
        world.network.set_bandwidth(name, up_mbit_s=mbit_s, down_mbit_s=down_mbit_s or mbit_s)

    async def peer(host: Host) -> None:
        rpc_config = RpcConfig(heartbeat_period_s=HEARTBEAT_S)
        endpoint = Endpoint(world.transport(host), config=rpc_config, rng=world.rng(f"endpoint of {host.name}"))
        roster = FixedMeeting(endpoint, {peer_id: False for peer_id in ids.values() if peer_id != endpoint.peer_id})
        config = AveragingConfig(averaging_timeout_s=600.0, bandwidth_mbit_s=(declared or {}).get(host.name))
        averager = RoundRunner(endpoint, "simulated", b"", roster, config, random.Random(1))
        await endpoint.listen([Address.of(host.ip, 0)])
        endpoints.append(endpoint)
        await asyncio.sleep(0.1)  # of virtual time: all listen
        for other in endpoints:
            endpoint.learn(other.peer_id, other.addresses)
            if other.peer_id < endpoint.peer_id:
                await endpoint.connect(other.addresses[0])
        await asyncio.sleep(5 * HEARTBEAT_S)  # all know each other, and how far away they are
        vector_N = torch.arange(NUMEL, dtype=torch.float32)
        rounds = rounds_of(endpoint.peer_id)
        for number in range(num_rounds):
            if host.name in (changes or {}).get(number, {}):
                limit(host.name, (changes or {})[number][host.name])
            meter = RoundMeter()
            result = await averager.average(vector_N, 1.0, meter=meter)
            assert result.averaged_N is not None
            torch.testing.assert_close(result.averaged_N, vector_N)
            roster.at = next_position(result.manifest.position, result.manifest)
            vectors = meter.num_bytes_sent / (4 * NUMEL)  # of n members, who reduces the fraction w sends 1 + (n - 2) w
            measured.owned[number][host.name] = round((vectors - 1) / (len(ids) - 2), 2)
            if host.name == "p0":
                measured.seconds.append(result.averaging_s)
        last = rounds[-1]
        measured.mbit_s[host.name] = last.group.members[last.machine.rank].bandwidth / 125_000
        await asyncio.sleep(10.0)  # the others are done, too; who is on a slow line is late
        await averager.close()
        await endpoint.close()

    for name, mbit_s in up_mbit_s.items():
        world.start(name, peer)
        limit(name, mbit_s)
    world.run(600.0)
    assert measured.mbit_s.keys() == up_mbit_s.keys()
    return measured


def test_a_slow_uplink_is_measured_and_spared() -> None:
    up_mbit_s = {"p0": 100.0, "p1": 100.0, "p2": 20.0}
    measured = run_rounds(3, up_mbit_s, latency_s=FAR_S)
    assert 18.0 < measured.mbit_s["p2"] < 40.0
    assert all(measured.mbit_s[name] > 1.3 * measured.mbit_s["p2"] for name in ("p0", "p1"))
    own_values_s = VECTOR_MBIT / 20.0
    assert measured.seconds[0] > 1.25 * own_values_s, "the slow one reduced a third"
    assert measured.seconds[-1] < 1.1 * own_values_s, "it does nothing but send its own values"


def test_on_short_links_a_slow_uplink_is_not_measured_and_nobody_counts_as_slow() -> None:
    """The system reports nothing there: all are judged by the same round, and reduce the same."""
    measured = run_rounds(2, {"p0": 100.0, "p1": 100.0, "p2": 20.0})
    assert measured.owned == [dict.fromkeys(measured.mbit_s, 0.33)] * 2


def test_a_declared_figure_counts_from_the_first_round() -> None:
    up_mbit_s = {"p0": 100.0, "p1": 20.0, "p2": 100.0}
    measured = run_rounds(1, up_mbit_s, up_mbit_s)
    assert measured.seconds[0] < 1.15 * VECTOR_MBIT / 20.0


FOUR = {f"p{number}": 40.0 for number in range(4)}
EQUAL = dict.fromkeys(FOUR, 0.25)
"""What each reduces."""


@pytest.mark.parametrize("down_mbit_s", few_of([None, 1000.0]))
def test_members_with_equal_lines_reduce_the_same_from_the_first_round_on(down_mbit_s: float | None) -> None:
    measured = run_rounds(3, FOUR, latency_s=FAR_S, down_mbit_s=down_mbit_s)
    assert measured.owned == [EQUAL] * 3
    assert measured.mbit_s == pytest.approx(FOUR, rel=0.1)


@pytest.mark.sweep
@pytest.mark.parametrize("factor", [0.1, 0.5, 1.8])
def test_a_peer_wrongly_taken_for_slow_or_fast_has_its_equal_part_again_within_three_rounds(factor: float) -> None:
    """Then all have less to send, or one of them much more, and all look as fast as they are nevertheless."""
    wrong = {**FOUR, "p1": factor * FOUR["p1"]}
    measured = run_rounds(4, FOUR, wrong, latency_s=FAR_S, down_mbit_s=None)
    assert measured.owned[0] != EQUAL
    assert measured.owned[3] == EQUAL, measured.owned


@pytest.mark.long
@pytest.mark.parametrize(("factor", "down_mbit_s"), few_of([(10.0, 1000.0), (2.0, None), (2.0, 1000.0), (4.0, None)]))
def test_a_line_that_gets_slower_and_faster_again_is_found_within_three_rounds(
    factor: float, down_mbit_s: float | None
) -> None:
    slow = FOUR["p1"] / factor
    changes = {3: {"p1": slow}, 6: {"p1": FOUR["p1"]}}
    measured = run_rounds(10, FOUR, latency_s=FAR_S, down_mbit_s=down_mbit_s, changes=changes)
    assert measured.owned[3] == EQUAL, "nobody knows yet"
    assert measured.owned[5]["p1"] < 0.1, measured.owned
    assert measured.seconds[5] < 1.25 * VECTOR_MBIT / slow, measured.seconds
    assert measured.owned[9] == EQUAL, measured.owned


@pytest.mark.parametrize("rates", [(50, 20, 50, 20), pytest.param((30, 20, 10, 20), marks=pytest.mark.sweep)])
def test_lines_of_different_rates_are_found(rates: Sequence[float]) -> None:
    """Nearly as fast as the best spans would be if there were no delays and no chunks."""
    up_mbit_s = {f"p{number}": rate for number, rate in enumerate(rates)}
    measured = run_rounds(4, up_mbit_s, latency_s=FAR_S, down_mbit_s=None)
    own_values_s = VECTOR_MBIT / min(rates)
    assert measured.seconds[0] > 1.4 * own_values_s, "all reduce the same"
    assert measured.seconds[-1] < 1.3 * own_values_s, (measured.seconds, measured.owned)
