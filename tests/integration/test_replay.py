"""A donor keeps the steps that are made while others download its state, and hands them on as they were committed."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import torch
from blake3 import blake3

from manyhands.averaging.averager_presence import next_position
from manyhands.averaging.codecs import Plan, codec_of_code, plan_of
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position, RoundManifest, SpanResult, digest_of_all
from manyhands.averaging.rounds import RoundRunner
from manyhands.averaging.state.content import State, StateHeader, state_of
from manyhands.averaging.state.server import StateServer, framed, receive_framed
from manyhands.base.errors import PeerLost, ProtocolViolation, Timeout
from manyhands.base.parameter_spec import ParameterSpec
from manyhands.optim.state import catching_up
from manyhands.optim.state.catching_up import (
    MAX_HEADER_BYTES,
    STREAM_KIND,
    KeptStep,
    MissedStep,
    ReplayAnswer,
    ReplayRequest,
    StepKeeper,
    fetch_step,
)
from manyhands.rpc import Endpoint
from manyhands.transport import Stream
from tests.swarm import RUN_ID, FixedMeeting, averagers

SHAPES = [(120, 100), (30,)]
NUMEL = 12_030
START = Position(0, b"start")
PLENTY = 10**9


def plan_of_code(code: int) -> Plan:
    return plan_of(SHAPES, codec_of_code(code, ""))


class Donor:
    """A peer that makes steps in rounds, and keeps them.

    Attributes:
        made: what each of its rounds has committed.
    """

    def __init__(self, runner: RoundRunner, roster: FixedMeeting, endpoint: Endpoint) -> None:
        self.runner, self.roster, self.endpoint = runner, roster, endpoint
        self.peer_id = endpoint.peer_id
        self.server = StateServer(endpoint, RUN_ID, self._capture, lambda: roster.at)
        self.server.state_bytes = PLENTY
        self.keeper = StepKeeper(endpoint, RUN_ID, self.server)
        self.made: list[tuple[RoundManifest, torch.Tensor]] = []

    def _capture(self) -> State:
        specs = [ParameterSpec("weight", (NUMEL,), "float32")]
        return state_of(StateHeader(self.roster.at, 0, specs, b"", b""), [torch.zeros(NUMEL)])

    async def step(self, seed: int, may_be_lacking: bool) -> None:
        values_N = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
        committed = await self.runner.average(values_N, 1.0, shapes=SHAPES)
        assert committed.averaged_N is not None
        assert committed.means is not None
        await self.keeper.add(committed.manifest, committed.means, may_be_lacking)
        self.made.append((committed.manifest, committed.averaged_N.clone()))
        committed.averaged_N.zero_()  # as an update changes it
        self.roster.at = next_position(self.roster.at, committed.manifest)


@asynccontextmanager
async def run(codec: str = "int8", **sizes: float) -> AsyncIterator[tuple[list[Donor], Endpoint]]:
    """Two peers that make steps together, and one more that makes none."""
    config = AveragingConfig(codec=codec, matchmaking_time_s=5.0)
    async with averagers(3, config=config, span_numel=1, **sizes) as (*members, (_, _, newcomer)):
        donors = [Donor(*member) for member in members]
        for donor in donors:
            donor.roster.others.pop(newcomer.peer_id)
        try:
            yield donors, newcomer
        finally:
            for donor in donors:
                donor.keeper.close()
                await donor.server.close()


async def make_steps(donors: list[Donor], num_steps: int, *, may_be_lacking: bool = False) -> None:
    for number in range(num_steps):
        await asyncio.gather(*(donor.step(10 * number + rank, may_be_lacking) for rank, donor in enumerate(donors)))


async def fetched(newcomer: Endpoint, donor: Donor, position: Position) -> MissedStep | None:
    return await fetch_step(newcomer, RUN_ID, donor.peer_id, position, plan_of_code)


async def kept_by(donor: Donor, newcomer: Endpoint) -> list[bool]:
    """Whether a donor hands out each of the steps that it has made."""
    return [await fetched(newcomer, donor, manifest.position) is not None for manifest, _ in donor.made]


async def sent_by(donor: Donor, newcomer: Endpoint) -> tuple[KeptStep, list[bytes]]:
    """The first step as a donor sends it: what it says of the step, and the encoded means by piece."""
    request = msgspec.msgpack.encode(ReplayRequest(RUN_ID, START))
    stream = await newcomer.open_bulk(donor.peer_id, STREAM_KIND, request, 5.0)
    await receive_framed(stream.receive_into, donor.peer_id, ReplayAnswer, MAX_HEADER_BYTES, "its steps")
    step = await receive_framed(stream.receive_into, donor.peer_id, KeptStep, MAX_HEADER_BYTES, "a step")
    plan, start, pieces = plan_of_code(step.codec), 0, []
    for stops in step.stops:
        bounds = [start, *stops]
        piece = bytearray(sum(plan.num_bytes(*chunk) for chunk in itertools.pairwise(bounds)))
        if piece:
            await stream.receive_into(memoryview(piece))
        pieces.append(bytes(piece))
        start = bounds[-1]
    newcomer.release(stream)
    return step, pieces


@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
async def test_the_steps_since_a_position_arrive_bit_by_bit(codec: str) -> None:
    async with run(codec) as (donors, newcomer):
        donor = donors[0]
        with donor.server.following(newcomer.peer_id):
            await make_steps(donors, 3)
        for manifest, mean_N in donor.made[1:]:
            step = await fetched(newcomer, donor, manifest.position)
            assert step is not None
            assert step.manifest == manifest
            assert torch.equal(step.mean_N, mean_N)
        assert await fetched(newcomer, donor, donor.roster.at) is None


async def test_nothing_is_kept_for_peers_that_cannot_make_a_step_from_its_means_alone() -> None:
    async with run() as (donors, newcomer):
        donor = donors[0]
        donor.keeper.is_of_use = False
        with donor.server.following(newcomer.peer_id):
            await make_steps(donors, 1)
            await make_steps(donors, 1, may_be_lacking=True)
            assert await kept_by(donor, newcomer) == [False, False]


async def test_nothing_is_kept_while_nobody_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catching_up, "TWO_DIALS_S", 0.0)
    async with run() as (donors, newcomer):
        donor = donors[0]
        await make_steps(donors, 1)
        assert await kept_by(donor, newcomer) == [False]
        with donor.server.following(newcomer.peer_id):
            await make_steps(donors, 2)
            assert await kept_by(donor, newcomer) == [False, True, True]
        await make_steps(donors, 1)
        assert await kept_by(donor, newcomer) == [False] * 4


async def test_kept_steps_take_no_more_than_a_state_and_the_newcomer_sees_the_gap() -> None:
    async with run() as (donors, newcomer):
        donor = donors[0]
        donor.server.state_bytes = 2 * 4 * NUMEL // 3  # two vectors of int8
        with donor.server.following(newcomer.peer_id):
            await make_steps(donors, 4)
            assert await kept_by(donor, newcomer) == [False, False, True, True]


def undecodable(kept: KeptStep, pieces: list[bytes]) -> tuple[KeptStep, list[bytes]]:
    """Scales that are not finite, and a digest of them."""
    pieces = [b"\xff" * len(piece) for piece in pieces]
    digest = digest_of_all([blake3(piece).digest() for piece in pieces])
    return msgspec.structs.replace(kept, manifest=msgspec.structs.replace(kept.manifest, digest=digest)), pieces


def altered(pieces: list[bytes]) -> list[bytes]:
    return [bytes([pieces[0][0] ^ 1]) + pieces[0][1:], *pieces[1:]]


def with_manifest(**fields: object) -> Callable[[KeptStep, list[bytes]], tuple[KeptStep, list[bytes]]]:
    def lie(kept: KeptStep, pieces: list[bytes]) -> tuple[KeptStep, list[bytes]]:
        manifest = msgspec.structs.replace(kept.manifest, **fields)
        return msgspec.structs.replace(kept, manifest=manifest), pieces

    return lie


LIES: dict[str, Callable[[KeptStep, list[bytes]], tuple[KeptStep, list[bytes]]]] = {
    "differ from what was committed": lambda kept, pieces: (kept, altered(pieces)),
    "sent a step from": lambda kept, pieces: (
        msgspec.structs.replace(kept, manifest=msgspec.structs.replace(kept.manifest, position=Position(7, b"else"))),
        pieces,
    ),
    "in a vector of": lambda kept, pieces: (msgspec.structs.replace(kept, stops=[[5], [4]]), pieces),
    "is not finite": undecodable,
    "2 members with the weights 1$": with_manifest(weights=[1.0]),
    "2 members with the weights 1, -1$": with_manifest(weights=[1.0, -1.0]),
    "2 members with the weights 1, nan$": with_manifest(weights=[1.0, math.nan]),
    "2 members with the weights 1, inf$": with_manifest(weights=[1.0, math.inf]),
    "2 members with the weights 1, 1$": with_manifest(marks=[0]),
    "2 members with the weights 1, 1": with_manifest(leader=2),
    "a step of 2 members": with_manifest(parts=[SpanResult(0, NUMEL, 0, [2])]),
    "no codec has code 99": lambda kept, pieces: (msgspec.structs.replace(kept, codec=99), pieces),
    "no codec has code 1;": lambda kept, pieces: (msgspec.structs.replace(kept, codec=1), pieces),
}


@pytest.mark.parametrize("reason", list(LIES))
async def test_a_donor_that_lies_is_named(reason: str) -> None:
    async with run() as (donors, newcomer):
        liar = donors[0]
        with liar.server.following(newcomer.peer_id):
            await make_steps(donors, 1)
        told, sent = LIES[reason](*await sent_by(liar, newcomer))

        async def lie(remote: object, header: bytes, stream: Stream) -> None:
            await stream.send(framed(ReplayAnswer(has_step=True)), framed(told), *filter(None, sent))
            await stream.wait_closed()

        liar.endpoint.refuse_bulk(STREAM_KIND)
        liar.endpoint.accept_bulk(STREAM_KIND, lie)
        with pytest.raises(ProtocolViolation, match=reason):
            await fetched(newcomer, liar, START)


async def test_a_donor_that_cuts_a_step_into_many_pieces_gains_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece comes before it counts as stalled."""
    async with run("none") as (donors, newcomer):
        donor = donors[0]
        with donor.server.following(newcomer.peer_id):
            await make_steps(donors, 1)
        step, _ = await sent_by(donor, newcomer)
        kept = msgspec.structs.replace(step, stops=[[NUMEL * i // 60] for i in range(1, 61)])

        async def trickle(remote: object, header: bytes, stream: Stream) -> None:
            await stream.send(framed(ReplayAnswer(has_step=True)), framed(kept))
            for [start], [stop] in itertools.pairwise([[0], *kept.stops]):
                await asyncio.sleep(0.05)
                await stream.send(bytes(4 * (stop - start)))
            await stream.wait_closed()

        donor.endpoint.refuse_bulk(STREAM_KIND)
        donor.endpoint.accept_bulk(STREAM_KIND, trickle)
        monkeypatch.setattr(catching_up, "STALL_S", 0.5)
        monkeypatch.setattr(catching_up, "MIN_BYTES_PER_S", 10**6)
        with pytest.raises(Timeout):
            await fetched(newcomer, donor, START)


async def test_a_step_is_kept_for_a_member_that_may_lack_it_until_the_next_one() -> None:
    async with run() as (donors, newcomer):
        donor = donors[0]
        await make_steps(donors, 1, may_be_lacking=True)
        (manifest, mean_N) = donor.made[0]
        step = await fetched(newcomer, donor, START)
        assert step is not None
        assert step.manifest == manifest
        assert torch.equal(step.mean_N, mean_N)


async def test_strangers_and_unreadable_requests_get_no_step() -> None:
    async with run() as (donors, newcomer):
        donor = donors[0]
        with donor.server.following(newcomer.peer_id):
            await make_steps(donors, 1)
        for header in (msgspec.msgpack.encode(ReplayRequest("another run", START)), b"\xff garbage"):
            stream = await newcomer.open_bulk(donor.peer_id, STREAM_KIND, header, 5.0)
            with pytest.raises(PeerLost):
                await stream.receive_into(memoryview(bytearray(1)))
            newcomer.release(stream)
        assert donor.endpoint.counters["protocol_violations"] == 1
