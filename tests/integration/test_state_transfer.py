"""A newcomer gets a whole state or a reason, whatever its donors do."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import torch

from manyhands.averaging.messages import Position
from manyhands.averaging.roster import Roster, lineage_of
from manyhands.averaging.state import download as downloading_module
from manyhands.averaging.state import server as server_module
from manyhands.averaging.state.content import State, StateHeader, sealed
from manyhands.averaging.state.server import (
    CHUNK,
    DIGESTS,
    FRAME,
    INDEX,
    STREAM_KIND,
    StateAnswer,
    StateRequest,
    StateServer,
)
from manyhands.base.deadline import time_limit
from manyhands.base.errors import Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.manifest import RunManifest
from manyhands.optim.state.catching_up import download_state
from manyhands.optim.state.state import Capture, specs_of
from manyhands.rpc import Endpoint
from manyhands.transport import Stream
from tests.network import PATIENCE_S
from tests.swarm import endpoints

AT = Position(5, lineage_of(b"seal", Roster()))
NUMEL = 300_000  # in one tensor: more than a backlog, so that a sender has to wait for its receiver


class Donor:
    """A peer with a state that it can change."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.peer_id = endpoint.peer_id
        self.position = AT
        self.weights = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)), torch.ones(3, 2)]
        self.optimizer = torch.optim.SGD([weight.requires_grad_() for weight in self.weights], lr=0.1, momentum=0.9)
        self.make_step()
        self.num_captures = 0
        self.copies: list[weakref.ref[torch.Tensor]] = []
        self.server = StateServer(endpoint, "run", lambda: self.capture(), lambda: self.position)

    def capture(self) -> State:
        """What it serves; a test may change that."""
        self.num_captures += 1
        state = self._copied()
        self.copies.append(weakref.ref(state.content))
        return state

    def _copied(self) -> State:
        state = Capture(self.optimizer, {}, self.position, 99, seal=b"seal").copy()
        assert state is not None
        return state

    def state(self) -> State:
        return sealed(self._copied())

    def make_step(self) -> None:
        for weight in self.weights:
            weight.grad = torch.ones_like(weight)
        self.optimizer.step()

    def move_on(self) -> None:
        self.make_step()
        self.position = Position(self.position.step + 1, AT.lineage)

    @property
    def manifest(self) -> RunManifest:
        return RunManifest("manyhands/1", "run", 8, specs_of(self.optimizer), [], "SGD", [{"lr": 0.1}], "", "none", {})


async def download(newcomer: Endpoint, *donors: Donor, wanted: Position = AT) -> State:
    async with time_limit(PATIENCE_S, "waiting for the download"):
        peer_ids = [donor.peer_id for donor in donors]
        return await download_state(newcomer, donors[0].manifest, peer_ids, wanted)


def assert_whole(state: State, donor: Donor) -> None:
    assert len(state.tensors) == 4, "two parameters and their momentum"
    expected = donor.state()
    assert state.header == expected.header
    assert state.digests == expected.digests
    for tensor, sent in zip(state.tensors, expected.tensors, strict=True):
        assert torch.equal(tensor, sent)


def behave(donor: Donor, handler: Callable[[Stream], Awaitable[None]]) -> None:
    """Have a donor answer downloads in its own way."""

    async def on_stream(remote: PeerId, header: bytes, stream: Stream) -> None:
        await handler(stream)

    donor.endpoint.refuse_bulk(STREAM_KIND)
    donor.endpoint.accept_bulk(STREAM_KIND, on_stream)


def framed(value: Any) -> bytes:
    encoded = msgspec.msgpack.encode(value)
    return len(encoded).to_bytes(4, "big") + encoded


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_a_state_arrives_whole(kind: str) -> None:
    async with endpoints(2, kind=kind) as (one, newcomer):
        donor = Donor(one)
        assert_whole(await download(newcomer, donor), donor)


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_a_donor_that_nobody_can_dial_is_asked_over_its_own_connection(kind: str) -> None:
    async with endpoints(2, kind=kind, clients=[0]) as (client, newcomer):
        donor = Donor(client)
        with pytest.raises(Unavailable, match="a peer in client mode cannot be dialled"):
            await download(newcomer, donor)
        await client.call_on(newcomer.peer_id, 5.0)
        async with time_limit(PATIENCE_S, "waiting for the connection"):
            while not newcomer.is_client(donor.peer_id):
                await asyncio.sleep(0.001)
        assert_whole(await download(newcomer, donor), donor)


async def test_a_donor_that_moves_on_meanwhile_hands_out_what_it_began_with() -> None:
    async with endpoints(3) as (one, newcomer, late):
        donor = Donor(one)
        before = donor.state()
        downloading = asyncio.ensure_future(download(newcomer, donor))
        async with time_limit(PATIENCE_S, "waiting for the stream"):
            while one.bytes_sent < 100_000:
                await asyncio.sleep(0)
        donor.move_on()
        later = await download(late, donor)
        assert later.header.position.step == 6
        assert_whole(later, donor)
        state = await downloading
        assert state.header == before.header
        assert all(torch.equal(ours, sent) for ours, sent in zip(state.tensors, before.tensors, strict=True))


async def test_newcomers_at_the_same_step_share_one_copy_and_then_it_is_gone() -> None:
    async with endpoints(4) as (one, *newcomers):
        donor = Donor(one)
        all_have_asked = threading.Event()
        copy_state = donor.capture

        def capture_once_all_have_asked() -> State:
            assert all_have_asked.wait(PATIENCE_S)
            return copy_state()

        donor.capture = capture_once_all_have_asked  # type: ignore[method-assign]
        downloads = asyncio.gather(*(download(newcomer, donor) for newcomer in newcomers))
        async with time_limit(PATIENCE_S, "waiting for all to ask"):
            while len(donor.server.followers(0.0)) < len(newcomers):
                await asyncio.sleep(0.001)
        all_have_asked.set()
        states = await downloads
        for state in states:
            assert_whole(state, donor)
        assert donor.num_captures == 1
        del states, state, downloads
        async with time_limit(PATIENCE_S, "waiting for the copy to be forgotten"):
            while any(copy() is not None for copy in donor.copies):
                gc.collect()
                await asyncio.sleep(0.001)


async def test_a_donor_that_dies_in_the_middle_is_followed_by_the_next() -> None:
    async with endpoints(3, kind="tls") as (one, two, newcomer):
        dying, donor = Donor(one), Donor(two)
        downloading = asyncio.ensure_future(download(newcomer, dying, donor))
        async with time_limit(PATIENCE_S, "waiting for the stream"):
            while one.bytes_sent < 500_000:
                await asyncio.sleep(0)
        one.wire.abort_all()
        assert_whole(await downloading, donor)


async def no_answer(stream: Stream) -> None:
    await asyncio.Event().wait()


async def garbage(stream: Stream) -> None:
    await stream.send((10).to_bytes(4, "big"), b"not msgpack")
    await stream.wait_closed()


async def nested(stream: Stream) -> None:
    header = b"\x81\xa1?" + b"\x91" * 100_000 + b"\xc0"  # lists in lists, under a key that nobody knows
    await stream.send(len(header).to_bytes(4, "big"), header)
    await stream.wait_closed()


async def huge_header(stream: Stream) -> None:
    await stream.send(b"\xff\xff\xff\xff" + b"x" * 100)
    await stream.wait_closed()


async def hang_up(stream: Stream) -> None:
    return


async def another_run(stream: Stream) -> None:
    await stream.send(framed(StateAnswer(None, "this peer trains something else")))
    await stream.wait_closed()


def header_of(donor: Donor, **changes: Any) -> StateHeader:
    return msgspec.structs.replace(donor.state().header, **changes)


@pytest.mark.parametrize(
    ("misbehave", "reason"),
    [
        (no_answer, "timed out"),
        (garbage, "cannot be read"),
        (nested, "cannot be read"),
        (huge_header, "4294967295 bytes"),
        (hang_up, "lost peer"),
        (another_run, "this peer trains something else"),
    ],
)
async def test_a_donor_that_misbehaves_is_named_and_the_next_is_asked(
    monkeypatch: pytest.MonkeyPatch, misbehave: Callable[[Stream], Awaitable[None]], reason: str
) -> None:
    monkeypatch.setattr(downloading_module, "RECORD_S", 0.1)
    async with endpoints(3) as (one, two, newcomer):
        bad, donor = Donor(one), Donor(two)
        behave(bad, misbehave)
        assert_whole(await download(newcomer, bad, donor), donor)
        with pytest.raises(Unavailable) as caught:
            await download(newcomer, bad)
        assert f"{bad.peer_id}: " in str(caught.value)
        assert reason in str(caught.value)


async def announce(stream: Stream, state: State) -> None:
    """Send all that comes before the first chunk, and wait until that is asked for."""
    await stream.send(framed(StateAnswer(state.header)), FRAME.pack(DIGESTS, len(state.digests)), *state.digests)
    await stream.receive_into(memoryview(bytearray(INDEX.size)))


@pytest.mark.parametrize("num_bytes", [0, 1, 1_000_000])
async def test_a_truncated_state_is_not_taken(num_bytes: int) -> None:
    async with endpoints(3) as (one, two, newcomer):
        bad, donor = Donor(one), Donor(two)

        async def truncate(stream: Stream) -> None:
            state = bad.state()
            await announce(stream, state)
            await stream.send(FRAME.pack(CHUNK, 0), state.chunk(0)[:num_bytes])
            await stream.close()

        behave(bad, truncate)
        assert_whole(await download(newcomer, bad, donor), donor)
        with pytest.raises(Unavailable, match="lost peer"):
            await download(newcomer, bad)


async def test_a_chunk_that_is_not_what_its_digest_says_is_not_taken() -> None:
    async with endpoints(3) as (one, two, newcomer):
        bad, donor = Donor(one), Donor(two)

        async def flip_a_bit(stream: Stream) -> None:
            state = bad.state()
            await announce(stream, state)
            state.chunk(0)[100] ^= 1
            await stream.send(FRAME.pack(CHUNK, 0), state.chunk(0))
            await stream.wait_closed()

        behave(bad, flip_a_bit)
        assert_whole(await download(newcomer, bad, donor), donor)
        with pytest.raises(Unavailable, match="chunk 0 of its state does not match the digest of it"):
            await download(newcomer, bad)


@pytest.mark.parametrize(
    "frame",
    [(CHUNK, 1), (7, 0), (DIGESTS, 2), (DIGESTS, 0), (DIGESTS, 2**32 - 1)],
    ids=["a chunk that nobody asked for", "an unknown frame", "more digests than chunks", "none", "billions"],
)
async def test_frames_that_make_no_sense_are_a_violation(frame: tuple[int, int]) -> None:
    async with endpoints(3) as (one, two, newcomer):
        bad, donor = Donor(one), Donor(two)

        async def lie(stream: Stream) -> None:
            await announce(stream, bad.state())
            await stream.send(FRAME.pack(*frame))
            await stream.wait_closed()

        behave(bad, lie)
        assert_whole(await download(newcomer, bad, donor), donor)
        with pytest.raises(Unavailable, match="in place of a chunk"):
            await download(newcomer, bad)


async def test_a_state_that_does_not_fit_is_refused_before_it_is_received() -> None:
    async with endpoints(3) as (one, two, newcomer):
        bad, donor = Donor(one), Donor(two)
        wrong = header_of(donor).tensors
        wrong[0] = msgspec.structs.replace(wrong[0], shape=(2**40,))

        async def lie(stream: Stream) -> None:
            await stream.send(framed(StateAnswer(header_of(bad, tensors=wrong))))
            await stream.wait_closed()

        behave(bad, lie)
        assert_whole(await download(newcomer, bad, donor), donor)
        with pytest.raises(Unavailable, match=r"does not fit: its parameter 0 is float32 of shape \[1099511627776\]"):
            await download(newcomer, bad)


async def test_a_donor_that_stands_still_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloading_module, "STALL_S", 0.1)
    async with endpoints(3) as (one, two, newcomer):
        bad, donor = Donor(one), Donor(two)

        async def stop_half_way(stream: Stream) -> None:
            state = bad.state()
            await announce(stream, state)
            await stream.send(FRAME.pack(CHUNK, 0), state.chunk(0)[:1000])
            await stream.wait_closed()

        behave(bad, stop_half_way)
        assert_whole(await download(newcomer, bad, donor), donor)


async def test_a_newcomer_that_stands_still_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STALL_S", 0.1)
    async with endpoints(2) as (one, newcomer):
        donor = Donor(one)
        request = msgspec.msgpack.encode(StateRequest("run"))
        stream = await newcomer.open_bulk(donor.peer_id, STREAM_KIND, request)
        async with time_limit(PATIENCE_S, "waiting for the donor to give up"):
            await stream.wait_closed()
        newcomer.release(stream)


async def test_a_donor_that_is_behind_is_not_followed() -> None:
    async with endpoints(3) as (one, two, newcomer):
        behind, donor = Donor(one), Donor(two)
        donor.move_on()
        wanted = donor.position
        assert_whole(await download(newcomer, behind, donor, wanted=wanted), donor)
        with pytest.raises(Unavailable, match="its state is of step 5, the run is at 6"):
            await download(newcomer, behind, wanted=wanted)


async def test_a_download_without_donors_of_the_run_raises_unavailable() -> None:
    async with endpoints(2) as (one, newcomer):
        donor = Donor(one)
        with pytest.raises(Unavailable, match="none is known"):
            await download_state(newcomer, donor.manifest, [], AT)
        other = msgspec.structs.replace(donor.manifest, run_id="other")
        with pytest.raises(Unavailable, match="this peer trains 'run'"):
            await download_state(newcomer, other, [donor.peer_id], AT)


async def test_a_donor_that_cannot_copy_its_state_says_nothing_and_lives() -> None:
    async with endpoints(2) as (one, newcomer):
        donor = Donor(one)
        capture, donor.capture = donor.capture, lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(Unavailable, match="lost peer"):
            await download(newcomer, donor)
        donor.capture = capture  # type: ignore[method-assign]
        assert_whole(await download(newcomer, donor), donor)


async def test_garbage_instead_of_a_request_is_counted() -> None:
    async with endpoints(2) as (one, newcomer):
        donor = Donor(one)
        stream = await newcomer.open_bulk(donor.peer_id, STREAM_KIND, b"\xff garbage")
        async with time_limit(PATIENCE_S, "waiting for the donor to hang up"):
            await stream.wait_closed()
        newcomer.release(stream)
        assert one.counters["protocol_violations"] == 1
        assert donor.num_captures == 0


async def test_nobody_waits_for_a_peer_that_only_looks() -> None:
    async with endpoints(2) as (one, other):
        donor = Donor(one)
        async with time_limit(PATIENCE_S, "waiting for the download"):
            state = await download_state(other, donor.manifest, [donor.peer_id], AT, is_onlooker=True)
        assert_whole(state, donor)
        assert donor.server.followers(60.0) == set()
        await download(other, donor)
        assert len(donor.server.followers(60.0)) == 1
