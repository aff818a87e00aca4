"""How a message is cut: nothing lost, nothing copied, small messages whole."""

from hypothesis import given
from hypothesis import strategies as st

from manyhands.transport.runs import CHUNK_BYTES, RUN_BYTES, runs_of

SIZES = st.one_of(st.integers(0, 10), st.sampled_from([CHUNK_BYTES, RUN_BYTES, RUN_BYTES + 1, 3 * RUN_BYTES]))


@given(st.lists(SIZES, max_size=4))
def test_the_runs_together_are_the_message(sizes: list[int]) -> None:
    buffers = [bytes([number]) * size for number, size in enumerate(sizes)]
    runs = list(runs_of(buffers))
    assert b"".join(chunk for run in runs for chunk in run) == b"".join(buffers)
    assert all(sum(map(len, run)) <= RUN_BYTES for run in runs)
    assert all(len(chunk) <= CHUNK_BYTES for run in runs for chunk in run)
    if sum(sizes) <= RUN_BYTES:
        assert len(runs) == 1


def test_chunks_are_views_of_the_senders_memory() -> None:
    buffer = bytearray(CHUNK_BYTES + 1)
    (run,) = runs_of([buffer])
    buffer[-1] = 7
    assert run[-1] == b"\x07"
