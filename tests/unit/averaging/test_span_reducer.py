"""What a reducer makes of what comes, also where the means are written over its own values."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from manyhands.averaging.allreduce.partition import Partition
from manyhands.averaging.allreduce.reducer import SpanReducer
from manyhands.averaging.codecs import FP16, INT8, NONE, Chosen, Codec, kernels, plan_of
from manyhands.averaging.memory import Memory
from manyhands.averaging.messages import Group, Member, Position
from manyhands.base.identity import PeerId
from tests.smaller import smaller

OWN, OTHER, LIAR = range(3)
NUMEL = 3 << 18
"""All of it is reduced by one member, in three chunks of several rows or pieces."""
CODECS = pytest.mark.parametrize("codec", [NONE, FP16, INT8], ids=lambda codec: codec.name)


@pytest.fixture(autouse=True)
def ready() -> None:
    kernels.prepare(kernels.MIN_NUMEL, "auto")


def values_of(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def group_of(weights: Sequence[float]) -> Group:
    members = [Member(PeerId(f"peer {rank}"), [], rank != OWN, weight) for rank, weight in enumerate(weights)]
    return Group(b"\1" * 32, members[OWN].peer_id, Position(0, b"\0" * 32), members)


def reduced(
    codec: Codec, bad_at: int | None, *, is_in_place: bool, shapes: Sequence[Sequence[int]] = ((3, NUMEL // 3),)
) -> tuple[torch.Tensor, list[list[int]], set[int]]:
    """The means, who contributed to each chunk, and who was blamed.

    Args:
        bad_at: from this byte on, 4 bytes of the liar's last chunk cannot be.
    """
    group, plan = group_of([1.0, 2.0, 3.0]), plan_of(shapes, codec)
    with smaller(span_numel=1):
        partition = Partition(group, range(3), plan)
    own_N = values_of(OWN)
    averaged_N = own_N if is_in_place else torch.empty(NUMEL)
    encoded = torch.empty(partition.num_bytes[OWN], dtype=torch.uint8)
    if codec is NONE:
        encoded = averaged_N.view(torch.uint8)
    reducer = SpanReducer(partition, OWN, own_N, averaged_N, encoded, Memory(), unsent=None, norms=None)
    blamed: set[int] = set()

    async def reduce() -> None:
        async for rank, _ in reducer.run():
            blamed.add(rank)
            reducer.lose(rank, is_violation=True)

    async def run() -> None:
        running = asyncio.ensure_future(reduce())
        for chunk, place in zip(partition.chunks[OWN], partition.places[OWN], strict=True):
            for rank in (OTHER, LIAR):
                inbox = reducer.inboxes.get(rank)
                if inbox is None:
                    continue
                while not inbox.has_room:
                    await asyncio.sleep(0)
                room = inbox.room(place.stop - place.start)
                plan.encode(values_of(rank)[chunk], chunk.start, room)
                if rank == LIAR and bad_at is not None and chunk.stop == NUMEL:
                    room[bad_at:][:4] = 0xFF
                reducer.put(rank, room)
                await asyncio.sleep(0)
        await running

    asyncio.run(asyncio.wait_for(run(), 30))
    return averaged_N, reducer.presents, blamed


@CODECS
def test_means_are_the_same_in_place(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    average = Codec.average

    def noted(*arguments: Any) -> int:
        done.append(average(*arguments))
        return done[-1]

    monkeypatch.setattr(Codec, "average", noted)
    means, presents, blamed = reduced(codec, None, is_in_place=False)
    in_place, *rest = reduced(codec, None, is_in_place=True)
    assert len(done) == 2 * len(presents), "in one pass"
    assert all(num_done > 0 for num_done in done)
    assert torch.equal(in_place, means)
    assert rest == [presents, blamed]
    expected = sum(values_of(rank) * (rank + 1) / 6 for rank in range(3))
    torch.testing.assert_close(means, expected, rtol=0, atol={NONE: 1e-6, FP16: 2e-3, INT8: 4e-2}[codec])


@CODECS
def test_a_member_with_bad_bytes_late_in_a_chunk_is_left_out_of_all_of_it(codec: Codec) -> None:
    """Also where means of that chunk were written over the reducer's own values already."""
    bad_at = {NONE: 4 * 1000, FP16: 2 * (4 + 2 * 65_536) + 4, INT8: 100 * (216 + 8) + 216}[codec]
    means, presents, blamed = reduced(codec, bad_at, is_in_place=False)
    in_place, *rest = reduced(codec, bad_at, is_in_place=True)
    assert blamed == {LIAR}
    assert presents[-1] == [OWN, OTHER]
    assert torch.equal(in_place, means)
    assert rest == [presents, blamed]


@CODECS
@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("is_broken", [False, True])
def test_a_tensor_that_is_not_averaged_is_that_of_the_largest_member(
    codec: Codec, is_in_place: bool, is_broken: bool
) -> None:
    first, last = NUMEL - 3000, NUMEL - 1000
    shapes = [(3, first // 3), Chosen((last - first,)), (NUMEL - last,)]
    means, _, blamed = reduced(codec, -4 if is_broken else None, is_in_place=is_in_place, shapes=shapes)
    assert blamed == ({LIAR} if is_broken else set())
    assert torch.equal(means[first:last], values_of(OTHER if is_broken else LIAR)[first:last])
    expected = sum(values_of(rank) * (rank + 1) for rank in ((OWN, OTHER) if is_broken else range(3)))
    torch.testing.assert_close(means[last:], expected[last:] / (3 if is_broken else 6))  # type: ignore[index]
