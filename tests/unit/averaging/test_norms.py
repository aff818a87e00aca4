"""The size of members' values, as their reducer adds it up."""

from __future__ import annotations

import math

import pytest
import torch

from manyhands.averaging.allreduce.norms import Norms
from manyhands.averaging.codecs import INT8, NONE, Chosen, Codec, Uncompared, plan_of
from manyhands.averaging.codecs.codec import sampled_square_of, square_of

NUM_VALUES = 5000


@pytest.mark.parametrize("codec", [NONE, INT8], ids=["none", "int8"])
def test_norms_leave_out_uncompared_and_chosen_numbers(codec: Codec) -> None:
    """Of a hundred parameters each has a share of 1, and BatchNorm counts its batches; gradients may be tiny."""
    plan = plan_of([(50, 100), Uncompared((100,)), (7,), Chosen((3,))], codec)
    values = [torch.cat([torch.full((NUM_VALUES + 107,), 1e-3 * times), torch.full((3,), 1e5)]) for times in (1, 30)]
    for vector in values:
        vector[NUM_VALUES : NUM_VALUES + 100] = 1.0
    mean = (values[0] + values[1]) / 2
    norms = Norms(plan, [1.0, 1.0])
    for chunk in (slice(0, 4000), slice(4000, plan.numel)):
        received = {}
        for rank, vector in enumerate(values):
            room = torch.empty(plan.num_bytes(chunk.start, chunk.stop), dtype=torch.uint8)
            plan.encode(vector[chunk], chunk.start, room)
            received[rank] = room.view(torch.float32) if codec is NONE else room
        before = {rank: room.clone() for rank, room in received.items()}
        sampled = {rank: sampled_square_of(vector[chunk]) for rank, vector in enumerate(values)}
        norms.add(chunk, mean[chunk], sampled, square_of(mean[chunk]), received, mean[chunk])
        assert all(torch.equal(room, received[rank]) for rank, room in before.items())
    one, other = norms.told()
    assert one == pytest.approx(1e-3 * math.sqrt(NUM_VALUES + 7), rel=0.01)
    assert other == pytest.approx(30 * one, rel=0.01)
