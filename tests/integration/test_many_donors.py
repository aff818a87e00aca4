"""A newcomer takes the chunks of a state from all donors that hold it, and loses nothing with any of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest
import torch

from manyhands.averaging.messages import Position
from manyhands.averaging.roster import Roster, Standing, lineage_of
from manyhands.averaging.state import content as state_module
from manyhands.averaging.state import download as download_module
from manyhands.averaging.state import server as server_module
from manyhands.averaging.state.content import StateHeader
from manyhands.averaging.state.server import CHUNK, DIGESTS, FRAME, INDEX, StateAnswer
from manyhands.base.deadline import time_limit
from manyhands.base.errors import Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.state.catching_up import download_state
from manyhands.rpc import Endpoint
from manyhands.transport import Stream
from tests.integration.test_state_transfer import AT, Donor, assert_whole, behave, download, framed
from tests.swarm import endpoints

CHUNK_BYTES = 1 << 16

OTHER_ROSTER = Roster({PeerId("another"): Standing(3, is_member=True)}, 5)
OTHER_PLACE = {
    "position": Position(AT.step, lineage_of(b"seal", OTHER_ROSTER)), "roster": OTHER_ROSTER, "seal": b"seal",
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "CHUNK_BYTES", CHUNK_BYTES)


def size_of(donor: Donor) -> int:
    return donor.state().content.numel()


async def requests(stream: Stream) -> AsyncIterator[int]:
    while True:
        index = bytearray(INDEX.size)
        await stream.receive_into(memoryview(index))
        yield INDEX.unpack(index)[0]


async def serve(stream: Stream, donor: Donor, num_chunks: int, period_s: float = 0.0) -> None:
    """Send so many of the chunks that are asked for, one in each period."""
    state = donor.state()
    await stream.send(framed(StateAnswer(state.header)), FRAME.pack(DIGESTS, len(state.digests)), *state.digests)
    async for index in requests(stream):
        if num_chunks == 0:
            return
        num_chunks -= 1
        await asyncio.sleep(period_s)
        await stream.send(FRAME.pack(CHUNK, index), state.chunk(index))


def die_after(donor: Donor, num_chunks: int) -> None:
    """Let a donor send so many chunks over its first stream, and hang up each later one."""
    left = itertools.chain([num_chunks], itertools.repeat(0))
    behave(donor, lambda stream: serve(stream, donor, next(left), 0.002))


def slowly(donor: Donor) -> Donor:
    """Let a donor send a chunk each 2 ms, so that others come to send too."""
    behave(donor, lambda stream: serve(stream, donor, 10**9, 0.002))
    return donor


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_donors_share_the_work_and_nothing_is_sent_twice_but_the_last_chunks(kind: str) -> None:
    async with endpoints(4, kind=kind) as (*holders, newcomer):
        donors = [slowly(Donor(endpoint)) for endpoint in holders]
        state = await download(newcomer, *donors)
        assert state.digests == donors[0].state().digests
        assert set(state.donors) == {donor.peer_id for donor in donors}
        sent = sum(endpoint.bytes_sent for endpoint in holders)
        at_most_twice = len(holders) * CHUNK_BYTES
        assert size_of(donors[0]) <= state.num_bytes == size_of(donors[0])
        assert sent < size_of(donors[0]) + at_most_twice + 100_000, "and what it takes to open the streams"


async def test_a_small_state_is_asked_of_one_donor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "CHUNK_BYTES", 1 << 22)
    async with endpoints(3) as (*holders, newcomer):
        donors = [Donor(endpoint) for endpoint in holders]
        assert_whole(await download(newcomer, *donors), donors[0])
        assert [donor.num_captures for donor in donors] == [1, 0]


async def test_a_donor_that_dies_costs_the_chunks_that_it_was_asked_for() -> None:
    async with endpoints(3) as (one, two, newcomer):
        dying, donor = Donor(one), slowly(Donor(two))
        die_after(dying, 10)
        state = await download(newcomer, dying, donor)
        assert state.digests == donor.state().digests
        assert set(state.donors) == {dying.peer_id, donor.peer_id}
        assert state.num_bytes == size_of(donor), "what it had sent was kept"


async def test_a_donor_whose_connection_breaks_is_asked_again_and_goes_on_where_it_was() -> None:
    async with endpoints(2) as (one, newcomer):
        donor = Donor(one)
        num_streams = itertools.count()

        async def break_once(stream: Stream) -> None:
            await serve(stream, donor, 10 if next(num_streams) == 0 else 10**9)

        behave(donor, break_once)
        state = await download(newcomer, donor)
        assert state.digests == donor.state().digests
        assert state.num_bytes == size_of(donor)
        assert next(num_streams) == 2


async def test_a_frozen_donor_costs_less_than_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "ANSWER_S", 0.2)
    monkeypatch.setattr(download_module, "BRIEF_S", 0.05)
    async with endpoints(3) as (one, two, newcomer):
        frozen, donor = Donor(one), slowly(Donor(two))

        async def freeze(stream: Stream) -> None:
            state = frozen.state()
            announced = FRAME.pack(DIGESTS, len(state.digests))
            await stream.send(framed(StateAnswer(state.header)), announced, *state.digests)
            await stream.send(FRAME.pack(CHUNK, 0), state.chunk(0)[:1000])
            await stream.wait_closed()

        behave(frozen, freeze)
        async with time_limit(15.0, "in place of the 20 s after which it is given up"):
            state = await download(newcomer, frozen, donor)
        assert state.digests == donor.state().digests
        assert state.donors == (donor.peer_id,)


@pytest.mark.parametrize("num_silent", [1, 3])
async def test_donors_that_never_answer_are_passed_over(monkeypatch: pytest.MonkeyPatch, num_silent: int) -> None:
    monkeypatch.setattr(download_module, "ANSWER_S", 0.2)
    monkeypatch.setattr(download_module, "BRIEF_S", 0.05)
    async with endpoints(num_silent + 2) as (one, *others, newcomer):
        donor, silent = Donor(one), [Donor(endpoint) for endpoint in others]
        for bad in silent:
            behave(bad, lambda stream: stream.wait_closed())
        async with time_limit(20.0, "in place of the 30 s that a header may take"):
            assert_whole(await download(newcomer, *silent, donor), donor)


async def test_a_donor_that_sends_wrong_chunks_is_named_and_the_rest_comes_from_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with endpoints(3) as (one, two, newcomer):
        liar, donor = Donor(one), slowly(Donor(two))

        async def lie(stream: Stream) -> None:
            state = liar.state()
            announced = FRAME.pack(DIGESTS, len(state.digests))
            await stream.send(framed(StateAnswer(state.header)), announced, *state.digests)
            async for index in requests(stream):
                wrong = bytearray(state.chunk(index))
                wrong[7] ^= 1
                await stream.send(FRAME.pack(CHUNK, index), wrong)

        behave(liar, lie)
        named: dict[PeerId, str] = {}
        state = await download_state(
            newcomer, donor.manifest, [liar.peer_id, donor.peer_id], AT, on_violation=named.__setitem__
        )
        assert state.digests == donor.state().digests
        assert state.donors == (donor.peer_id,)
        assert list(named) == [liar.peer_id]
        assert "does not match the digest of it" in named[liar.peer_id]
        assert f"The state cannot be loaded from peer {liar.peer_id}" in caplog.text
        assert "does not match the digest of it" in caplog.text


async def test_each_description_is_told_with_the_donor_that_sent_it_alone() -> None:
    """What one donor says of a run must not count as the word of all that were asked."""
    async with endpoints(3) as (one, two, newcomer):
        silent, donor = Donor(one), slowly(Donor(two))

        async def refuse(stream: Stream) -> None:
            await stream.send(framed(StateAnswer(reason="it trains no more")))

        behave(silent, refuse)
        told: dict[PeerId, StateHeader] = {}
        asked = [silent.peer_id, donor.peer_id]
        state = await download_state(newcomer, donor.manifest, asked, AT, on_header=told.__setitem__)
        assert told == {donor.peer_id: state.header}


async def test_states_that_differ_by_rounding_are_not_mixed() -> None:
    async with endpoints(5) as (*holders, newcomer):
        donors = [Donor(endpoint) for endpoint in holders]
        for donor in donors[1::2]:  # two of each kind
            with torch.no_grad():
                donor.weights[0][200_000] += 1e-7
        for donor in donors:
            slowly(donor)
        state = await download(newcomer, *donors)
        assert state.digests == donors[0].state().digests
        assert set(state.donors) == {donors[0].peer_id, donors[2].peer_id}


async def test_a_download_whose_donors_of_one_state_are_gone_fails_and_the_next_takes_another_state() -> None:
    async with endpoints(3) as (one, two, newcomer):
        dying, donor = Donor(one), slowly(Donor(two))
        with torch.no_grad():
            donor.weights[0].mul_(1 + 1e-6)
        die_after(dying, 8)
        with pytest.raises(Unavailable, match="its state differs from the one that is being downloaded"):
            await download(newcomer, dying, donor)
        await one.close()
        state = await download(newcomer, dying, donor)
        assert state.digests == donor.state().digests
        assert state.donors == (donor.peer_id,)


async def test_donors_that_differ_in_their_last_tensor_share_in_sending_the_rest() -> None:
    async with endpoints(4) as (*holders, newcomer):
        donors = [slowly(Donor(endpoint)) for endpoint in holders]
        for number, donor in enumerate(donors):  # as the inner statistics of local steps
            donor.optimizer.state[donor.weights[1]]["momentum_buffer"] += number
        state = await download(newcomer, *donors)
        (chosen,) = (donor for donor in donors if donor.peer_id in state.donors)
        assert state.digests == chosen.state().digests
        assert all(endpoint.bytes_sent > 4 * CHUNK_BYTES for endpoint in holders)


async def test_all_donors_that_die_are_named() -> None:
    async with endpoints(3) as (one, two, newcomer):
        donors = [Donor(one), Donor(two)]
        for donor in donors:
            die_after(donor, 3)
        with pytest.raises(Unavailable) as caught:
            await download(newcomer, *donors)
        assert all(f"{donor.peer_id}: lost peer" in str(caught.value) for donor in donors)


async def test_a_donor_that_is_busy_with_others_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_DOWNLOADS", 1)
    monkeypatch.setattr(download_module, "BRIEF_S", 0.01)
    async with endpoints(6) as (one, *newcomers):
        donor = Donor(one)
        states = await asyncio.gather(*(download(newcomer, donor) for newcomer in newcomers))
        for state in states:
            assert_whole(state, donor)


async def test_twenty_newcomers_at_once_all_get_the_state_and_nothing_is_sent_twice() -> None:
    async with endpoints(23) as (one, two, three, *newcomers):
        donors = [Donor(endpoint) for endpoint in (one, two, three)]
        loop, expected = asyncio.get_running_loop(), donors[0].state().digests
        seconds = []

        async def timed(newcomer: Endpoint, number: int) -> None:
            begun = loop.time()
            asked = [donor.peer_id for donor in donors[number % 3 :] + donors[: number % 3]]
            state = await download_state(newcomer, donors[0].manifest, asked, AT)
            assert state.digests == expected
            seconds.append(loop.time() - begun)

        async with time_limit(60.0, "twenty downloads"):
            await asyncio.gather(*(timed(newcomer, number) for number, newcomer in enumerate(newcomers)))
        sent = sum(donor.endpoint.bytes_sent for donor in donors)
        assert sent < 1.3 * len(newcomers) * size_of(donors[0])


async def test_chunks_that_have_not_changed_are_not_downloaded_again() -> None:
    async with endpoints(2) as (one, newcomer):
        donor = Donor(one)
        first = await download(newcomer, donor)
        with torch.no_grad():
            donor.weights[0][-1] += 1.0
        donor.position = Position(6, AT.lineage)
        before = one.bytes_sent
        second = await download_state(newcomer, donor.manifest, [donor.peer_id], AT, held=first)
        assert second.digests == donor.state().digests
        assert torch.equal(second.tensors[0], donor.weights[0].detach())
        assert second.num_bytes <= 2 * CHUNK_BYTES
        assert one.bytes_sent - before < 3 * CHUNK_BYTES


@pytest.mark.parametrize("first", [0, 1, 2])
async def test_of_several_states_the_one_that_most_donors_hold_is_taken(first: int) -> None:
    async with endpoints(4) as (*holders, newcomer):
        donors = [slowly(Donor(endpoint)) for endpoint in holders]
        with torch.no_grad():
            donors[0].weights[0][0] += 1e-7
        state = await download(newcomer, *donors[first:], *donors[:first])
        assert state.digests == donors[1].state().digests
        assert donors[0].peer_id not in state.donors


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("change", [{"ancestry": b"another0"}, OTHER_PLACE])
async def test_one_donor_alone_does_not_say_where_the_run_began_or_who_its_members_are(
    change: dict[str, object], first: int
) -> None:
    """Checkpoints are kept or set aside by it. It is the fastest."""
    async with endpoints(4) as (*holders, newcomer):
        donors = [Donor(holders[0]), *(slowly(Donor(endpoint)) for endpoint in holders[1:])]
        capture = donors[0].capture
        donors[0].capture = lambda: replace(  # type: ignore[method-assign]
            capture(), header=msgspec.structs.replace(capture().header, **change)
        )
        state = await download(newcomer, *donors[first:], *donors[:first])
        assert state.header == donors[1].state().header


async def test_a_donor_whose_roster_is_not_that_of_its_lineage_is_named_before_it_sends_a_tensor() -> None:
    async with endpoints(3) as (one, two, newcomer):
        liar, donor, named = Donor(one), Donor(two), dict[PeerId, str]()
        capture = liar.capture
        liar.capture = lambda: replace(  # type: ignore[method-assign]
            capture(), header=msgspec.structs.replace(capture().header, roster=OTHER_PLACE["roster"])
        )
        state = await download_state(
            newcomer, donor.manifest, [liar.peer_id, donor.peer_id], AT, on_violation=named.__setitem__
        )
        assert_whole(state, donor)
        assert state.donors == (donor.peer_id,)
        assert named == {
            liar.peer_id: f"peer {liar.peer_id}: its state does not fit: its roster is not that of its lineage"
        }


async def test_a_donor_that_does_not_answer_delays_the_choice_by_a_moment() -> None:
    async with endpoints(3) as (one, two, newcomer):
        silent, donor = Donor(one), Donor(two)
        behave(silent, lambda stream: stream.wait_closed())
        begun = asyncio.get_running_loop().time()
        assert_whole(await download(newcomer, silent, donor), donor)
        assert asyncio.get_running_loop().time() - begun < 1.5, "0.3 s, and what a busy machine takes"
