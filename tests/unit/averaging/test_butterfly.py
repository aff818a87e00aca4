from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.averaging.codecs import INT8, NONE, Codec, Plan, plan_of
from manyhands.base.errors import RoundAborted
from manyhands.base.identity import PeerId
from tests.memory_transport import MemoryStream
from tests.unit.averaging.groups import butterfly_of, group_of, plan_in


def exact(numel: int) -> Plan:
    return plan_of([(numel,)], NONE)


@given(st.integers(1, 6), st.sets(st.integers(0, 5)), st.integers(0, 20))
def test_partners_agree_and_nobody_is_left_out(num_members: int, clients: set[int], numel: int) -> None:
    clients &= set(range(num_members - 1))  # at least one can be dialled
    group = group_of(num_members, clients=sorted(clients))

    async def partners() -> list[list[int]]:
        return [butterfly_of(group, rank, torch.zeros(numel), exact(numel)).partners for rank in range(num_members)]

    by_rank = asyncio.run(partners())
    for rank, others in enumerate(by_rank):
        assert rank not in others
        assert all(rank in by_rank[other] for other in others), "both ends of a stream must know of it"
        assert not any(rank in clients and other in clients for other in others), "clients cannot dial each other"
        if numel >= num_members - len(clients) and rank in clients:
            assert others == [other for other in range(num_members) if other not in clients]


@given(st.integers(1, 8), st.sets(st.integers(0, 7)), st.integers(0, 40), st.integers(1, 50))
def test_of_a_small_vector_everybody_talks_to_the_few_that_reduce_it(
    num_members: int, clients: set[int], numel: int, span_numel: int
) -> None:
    clients &= set(range(num_members - 1))
    group = group_of(num_members, clients=sorted(clients))

    async def partners() -> list[list[int]]:
        values_N = torch.zeros(numel)
        return [butterfly_of(group, rank, values_N, exact(numel), span_numel).partners for rank in range(num_members)]

    by_rank = asyncio.run(partners())
    num_reducers = max(1, min(num_members - len(clients), numel // span_numel)) if numel else 0
    num_streams = sum(map(len, by_rank)) // 2
    num_others = num_members - num_reducers
    assert num_streams == num_reducers * (num_reducers - 1) // 2 + num_reducers * num_others
    assert all(rank in by_rank[other] for rank, others in enumerate(by_rank) for other in others)


@pytest.mark.parametrize("codec", [NONE, INT8])
async def test_own_values_that_are_not_finite_never_leave(codec: Codec) -> None:
    plan = plan_in(codec, 2)
    butterfly = butterfly_of(group_of(1), 0, torch.tensor([1.0, float("inf")]), plan)
    with pytest.raises(RoundAborted, match="the values of peer peer00 are not finite"):
        await butterfly.run({})


async def test_own_values_that_cannot_be_encoded_are_not_sent() -> None:
    butterfly = butterfly_of(group_of(2), 0, torch.tensor([1.0, float("nan")]), plan_in(INT8, 2))
    here, there = MemoryStream(PeerId("here"), PeerId("there")), MemoryStream(PeerId("there"), PeerId("here"))
    here.other, there.other = there, here

    async def opened() -> MemoryStream:
        return here

    with pytest.raises(RoundAborted, match="the values of peer peer00 are not finite"):
        await butterfly.run({1: opened()})
    assert here.bytes_sent == 0
