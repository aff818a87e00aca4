"""The size of members' values, as their reducer adds it up."""

from __future__ import annotations

import math

import pytest
import torch

from manyhands.averaging.allreduce.checks import Norms
from manyhands.averaging.codecs import (
    INT8,
    NONE,
    Chosen,
    Codec,
    Sparse,
    Uncompared,
    Unsent,
    plan_of,
)
from manyhands.averaging.codecs.codec import square_of
from tests.unit.averaging.groups import sent

NUM_VALUES = 5000


@pytest.mark.parametrize("codec", [NONE, INT8], ids=["none", "int8"])
def test_norms_leave_out_uncompared_and_chosen_numbers(codec: Codec) -> None:
    """Of a hundred parameters each has a share of 1, and BatchNorm counts its batches; gradients may be tiny."""
    plan = plan_of([(50, 100), Uncompared((100,)), (7,), Chosen((3,))], codec)
    values = [torch.cat([torch.full((NUM_VALUES + 107,), 1e-3 * times), torch.full((3,), 1e5)]) for times in (1, 30)]
    for vector in values:
        vector[NUM_VALUES : NUM_VALUES + 100] = 1.0
    norms = Norms(plan, 2)
    for chunk in (slice(0, 4000), slice(4000, plan.numel)):
        received = {}
        for rank, vector in enumerate(values):
            room = torch.empty(plan.num_bytes(chunk.start, chunk.stop), dtype=torch.uint8)
            plan.encode(vector[chunk], chunk.start, room)
            received[rank] = room.view(torch.float32) if codec is NONE else room
        before = {rank: room.clone() for rank, room in received.items()}
        squares = {rank: square_of(vector[chunk]) for rank, vector in enumerate(values)}
        norms.add(chunk, squares, received, values[0][chunk])
        assert all(torch.equal(room, received[rank]) for rank, room in before.items())
    one, other = norms.told().norms
    assert one == pytest.approx(1e-3 * math.sqrt(NUM_VALUES + 7), rel=0.01)
    assert other == pytest.approx(30 * one, rel=0.01)


def test_a_vector_has_the_norm_that_its_reducers_measure() -> None:
    plan = plan_of([(50, 100), Uncompared((100,)), (7,), Chosen((3,))], NONE)
    vector = torch.randn(plan.numel, generator=torch.Generator().manual_seed(1))
    vector[NUM_VALUES : NUM_VALUES + 100] = 1e30
    vector[-3:] = 1e30
    counted = torch.cat([vector[:NUM_VALUES], vector[NUM_VALUES + 100 : -3]])
    assert plan.norm(vector) == pytest.approx(counted.norm().item(), rel=1e-5)
    vector[0] = math.nan
    assert plan.norm(vector) == math.inf


def test_the_norm_that_is_said_with_a_sparse_codec_is_that_of_the_values_that_are_sent() -> None:
    plan = plan_of([(100, 4096), (7,)], Sparse())
    vector = torch.randn(plan.numel, generator=torch.Generator().manual_seed(1))
    unsent = Unsent(plan)
    for _ in range(3):
        said = unsent.norm_of(vector)
        assert said == pytest.approx(sent(unsent, vector).norm().item(), rel=1e-5)
        unsent.commit()
        assert said < plan.norm(vector)
    assert unsent.norm_of(torch.full((plan.numel,), math.inf)) == math.inf
