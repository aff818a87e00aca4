"""How a message is cut: nothing lost, nothing copied."""

from hypothesis import given
from hypothesis import strategies as st

from manyhands.transport.chunks import CHUNK_BYTES, buffer_chunks

SIZES = st.one_of(st.integers(0, 10), st.sampled_from([CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES]))


@given(st.lists(SIZES, max_size=4))
def test_the_chunks_together_are_the_message(sizes: list[int]) -> None:
    buffers = [bytes([number]) * size for number, size in enumerate(sizes)]
    chunks = list(buffer_chunks(buffers))
    assert b"".join(chunks) == b"".join(buffers)
    assert all(0 < len(chunk) <= CHUNK_BYTES for chunk in chunks)


def test_chunks_are_views_of_the_senders_memory() -> None:
    buffer = bytearray(CHUNK_BYTES + 1)
    last = list(buffer_chunks([buffer]))[-1]
    buffer[-1] = 7
    assert last == b"\x07"
