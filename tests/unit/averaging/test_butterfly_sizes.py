"""Sizes of two layers that must fit each other."""

from __future__ import annotations

from manyhands.averaging.allreduce.butterfly import PIECE_NUMEL
from manyhands.transport.record_memory import ROOM_BYTES
from manyhands.transport.sealed_stream import NEAR_BYTES
from manyhands.transport.sealing import RECORD_EXTRA_BYTES

LOOPBACK_SEGMENT_BYTES = 65_483


def test_a_piece_of_float32_is_one_record_of_whole_segments() -> None:
    assert 4 * PIECE_NUMEL == NEAR_BYTES
    num_segments = (NEAR_BYTES + RECORD_EXTRA_BYTES) / LOOPBACK_SEGMENT_BYTES
    assert 3.99 < num_segments <= 4
    assert NEAR_BYTES + RECORD_EXTRA_BYTES <= ROOM_BYTES
