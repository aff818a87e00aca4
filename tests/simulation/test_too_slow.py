"""Who is too slow for a round finds out how slow it is, and what it owns in the next one fits; in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from manyhands.averaging.averager_presence import next_position
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position
from manyhands.averaging.roster import Roster, Standing, Trouble
from manyhands.averaging.rounds import CommittedRound, RoundRunner
from manyhands.base.address import Address
from manyhands.base.errors import RoundAborted, TooSlow
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint
from manyhands.testing import Host, World, links, stream
from tests.swarm import FixedMeeting

NUM_PEERS = 8
NUMEL = 250_000
VECTOR_MBIT = 4 * NUMEL * 8 / 1e6
PERIOD_S = 45.0
SLOW = "p3"

Result = CommittedRound | RoundAborted


@dataclass
class Lines:
    """Peers that average once in ``PERIOD_S``; nobody knows its own bandwidth before.

    Attributes:
        up_mbit_s: what each peer sends a second.
        down_mbit_s: what each receives.
        guest: a peer that is no member of the run, in which there was trouble.
        results: what came of the rounds of each peer.
        seconds: how long each took it.
    """

    up_mbit_s: dict[str, float]
    down_mbit_s: float
    latency_s: float
    config: AveragingConfig
    numel: int = NUMEL
    guest: str = ""
    results: dict[str, list[Result]] = field(default_factory=lambda: defaultdict(list))
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        logging.getLogger("manyhands").setLevel(logging.ERROR)
        self._world = World(1)
        self.ids = {name: self._world.identity(name).peer_id for name in self.up_mbit_s}
        self._addresses: dict[PeerId, list[Address]] = {}
        self._latest = Position(0, b"start")

    def run(self, num_rounds: int) -> None:
        world = self._world
        world.network.default_link.latency_s = self.latency_s
        for name, up_mbit_s in self.up_mbit_s.items():
            world.host(name)
            world.network.set_bandwidth(name, up_mbit_s=up_mbit_s, down_mbit_s=self.down_mbit_s)
            world.start(name, self._peer)
        world.run(num_rounds * PERIOD_S + 1.0)

    async def _peer(self, host: Host) -> None:
        world, name = self._world, host.name
        endpoint = Endpoint(world.transport(host), rng=world.rng(f"endpoint of {name}"))
        meeting = FixedMeeting(endpoint, {peer_id: False for other, peer_id in self.ids.items() if other != name})
        if self.guest:
            members = {peer_id: Standing(3, is_member=True, can_lead=True) for peer_id in sorted(self.ids.values())}
            del members[self.ids[self.guest]]
            meeting.of_run = Roster(members, trouble=(Trouble.MEMBER,))
        runner = RoundRunner(endpoint, "run", b"", meeting, self.config, world.rng(f"rounds of {name}"))
        await endpoint.listen([Address.of(host.ip, 0)])
        self._addresses[endpoint.peer_id] = endpoint.addresses
        try:
            for number in itertools.count():
                await asyncio.sleep(number * PERIOD_S + 1.0 - world.loop.time())
                for other, where in self._addresses.items():
                    endpoint.learn(other, where)
                meeting.at = self._latest
                if number:
                    meeting.of_run = None
                meeting.missing.clear()
                await self._take_part(name, runner)
        finally:
            await runner.close()
            await endpoint.close()

    async def _take_part(self, name: str, runner: RoundRunner) -> None:
        values_N = torch.full((self.numel,), float(name[1:]))
        result: Result
        began = self._world.loop.time()
        try:
            result = await runner.average(values_N, 1.0, shapes=[(self.numel // 1000, 1000)])
            self._latest = max(
                self._latest, next_position(result.manifest.position, result.manifest), key=lambda at: at.step
            )
        except RoundAborted as error:
            result = error
        self.results[name].append(result)
        self.seconds[name].append(self._world.loop.time() - began)


def rounds_with_one_slow_peer(up_mbit_s: float, num_rounds: int, *, is_guest: bool = False) -> tuple[Lines, PeerId]:
    """One of ``NUM_PEERS`` sends so much a second, the others have 50 Mbit/s."""
    up = {f"p{number}": 50.0 for number in range(NUM_PEERS)} | {SLOW: up_mbit_s}
    config = AveragingConfig(matchmaking_time_s=4.0, averaging_timeout_s=30.0, codec="none")
    lines = Lines(up, 50.0, 0.005, config, guest=SLOW if is_guest else "")
    lines.run(num_rounds)
    return lines, lines.ids[SLOW]


def rounds_of_slow_peers(mbit_s: float, numel: int, num_rounds: int, **settings: Any) -> list[list[str]]:
    """Four peers on equal lines with a short round trip; returns what each round was for each peer, in words.

    Args:
        settings: of the rounds.
    """
    config = AveragingConfig(matchmaking_time_s=4.0, averaging_timeout_s=20.0, **settings)
    lines = Lines({f"p{number}": mbit_s for number in range(4)}, mbit_s, 0.0005, config, numel)
    lines.run(num_rounds)
    return [[in_words(result) for result in results] for results in zip(*lines.results.values(), strict=True)]


def in_words(result: Result) -> str:
    if isinstance(result, RoundAborted):
        assert isinstance(result, TooSlow)
        return result.reason
    assert result.averaged_N is not None
    assert result.averaged_N[0] == pytest.approx(1.5, rel=0.01)
    return "committed"


@pytest.fixture(autouse=True)
def _small_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that calls get through beside values on the slow link."""
    monkeypatch.setattr(links, "TURN_BYTES", 1400)
    monkeypatch.setattr(stream, "TURN_BYTES", 1400)


@pytest.mark.long
def test_a_peer_that_was_too_slow_reduces_less_in_the_next_round_and_takes_part() -> None:
    """Its own values take it 20 s of 30; with an eighth to reduce it would be 35 s."""
    rounds, slow = rounds_with_one_slow_peer(VECTOR_MBIT / 20.0, 3)
    for name, results in rounds.results.items():
        first, *rest = results
        assert isinstance(first, CommittedRound)
        assert first.blamed == (slow,), (name, first.reason)
        assert "at its pace it would need 3" in first.reason
        for result in rest:
            assert isinstance(result, CommittedRound), (name, result)
            assert result.averaged_N is not None
            assert result.blamed == (), (name, result.reason)
            assert result.averaged_N[0] == pytest.approx(sum(range(NUM_PEERS)) / NUM_PEERS)
        assert all(seconds < 22.0 for seconds in rounds.seconds[name][1:]), rounds.seconds


def test_a_peer_that_cannot_send_its_own_values_in_time_is_told_so() -> None:
    """They take it 80 s. The first time it should have reduced, too."""
    rounds, slow = rounds_with_one_slow_peer(VECTOR_MBIT / 80.0, 2)
    first, second = rounds.results[SLOW]
    for result in (first, second):
        assert slow in result.blamed
        needed = re.search(r"at its pace it would need (\d+) s", result.reason)
        assert needed is not None, result.reason
        assert 70 <= int(needed[1]) <= 185
        assert f"{slow} is too slow for the time that this round has" in result.reason


@pytest.mark.long
@pytest.mark.parametrize("values_s", [20.0, 2.0])
def test_a_guest_that_is_far_slower_than_the_others_is_not_waited_for(values_s: float) -> None:
    """But where it is only a little slower it is, else it would be to blame again and again."""
    rounds, slow = rounds_with_one_slow_peer(VECTOR_MBIT / values_s, 2, is_guest=True)
    for name, (first, second) in rounds.results.items():
        assert isinstance(first, CommittedRound)
        assert isinstance(second, CommittedRound)
        if values_s == 2.0:
            assert first.blamed == (), (name, first.reason)
        else:
            assert first.blamed == (slow,)
            assert "holds up the others" in first.reason
            assert rounds.seconds[name][0] < 6.0, "else 15 s: half of the round"
        assert second.blamed == (), "it is doubted no more, and reduces nothing"


NUMEL_OF_SLOW = 750_000
"""Of a vector that takes four peers 24 s at 1.5 Mbit/s, of the 20 s that a round has; 6 s with 8 bits."""


def test_a_round_that_was_too_slow_for_the_lines_makes_the_next_one_take_8_bits() -> None:
    """On short links nobody knew before how slow they are."""
    first, *others = rounds_of_slow_peers(1.5, NUMEL_OF_SLOW, 3)
    assert first, "nobody knows the lines yet"
    for said in first:
        assert re.search(r"3 MB among 4 peers with codec 'none' takes 2\d s at the 1\.[345]\d* Mbit/s", said), said
        assert "the next one takes codec 'int8': about 6 s" in said or "about 7 s" in said
        assert re.search("The round ended because .*(averaging|too slow|no vote)", said), said
    assert others == [["committed"] * 4] * 2


@pytest.mark.parametrize(("codec", "options"), [
    ("none", ["codec='int8'", "codec='int4'", "averaging_timeout_s=", "local steps"]),
    ("auto", ["codec='int4'", "averaging_timeout_s=", "local steps"]),
])  # fmt: skip
def test_a_round_that_cannot_fit_says_the_size_the_rate_the_time_and_what_to_change(
    codec: str, options: list[str]
) -> None:
    numel = NUMEL_OF_SLOW if codec == "none" else 4 * NUMEL_OF_SLOW
    outcomes = rounds_of_slow_peers(1.5, numel, 2, codec=codec)
    for said in outcomes[-1]:
        given = said.partition("give all peers of the run one of these: ")[2]
        assert [option for option in options if option in given] == options, said
        assert "codec='none'" not in given
