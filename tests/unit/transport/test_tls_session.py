"""TLS without sockets: what goes in comes out, and nothing that was altered does."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.transport.certificate import ALPN
from manyhands.transport.tls_session import TlsEnded, TlsFailed, TlsSession, tls_context
from tests.network import identity_of

CONTEXTS = [tls_context(identity_of(number), is_server=number == 1) for number in (0, 1)]


def handshaken() -> tuple[TlsSession, TlsSession]:
    here, there = (TlsSession(context, is_server=number == 1) for number, context in enumerate(CONTEXTS))
    done = [False, False]
    while not all(done):
        for number, (one, other) in enumerate(((here, there), (there, here))):
            done[number] = one.handshake()
            other.received(memoryview(one.ciphertext()))
    return here, there


def carried(here: TlsSession) -> bytes:
    parts = []
    while data := here.ciphertext():
        parts.append(data)
    return b"".join(parts)


def read_all(there: TlsSession, num_bytes: int) -> bytes:
    target = bytearray(num_bytes)
    return bytes(target[: there.read_into(memoryview(target))])


def test_both_sides_prove_who_they_are() -> None:
    here, there = handshaken()
    assert (here.remote_peer_id(), there.remote_peer_id()) == (identity_of(1).peer_id, identity_of(0).peer_id)
    assert here.selected_alpn == there.selected_alpn == ALPN


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 40_000), max_size=6), cut=st.integers(1, 20_000), room=st.integers(1, 50_000))
def test_bytes_come_out_in_order_however_they_are_cut(sizes: list[int], cut: int, room: int) -> None:
    here, there = handshaken()
    data = random.Random(cut).randbytes(sum(sizes))
    start = 0
    for size in sizes:
        here.write(memoryview(data)[start : start + size])
        start += size
    sent = carried(here)
    received = b""
    for at in range(0, len(sent), cut):
        there.received(memoryview(sent)[at : at + cut])
        while part := read_all(there, room):
            received += part
    assert received == data


def test_bytes_before_an_alteration_are_read_and_none_after_it() -> None:
    here, there = handshaken()
    here.write(memoryview(b"good"))
    good = carried(here)
    here.write(memoryview(b"altered on its way"))
    bad = bytearray(carried(here))
    bad[-1] ^= 1
    there.received(memoryview(good + bad))
    assert read_all(there, 100) == b"good"
    for _ in range(2):
        with pytest.raises(TlsFailed, match="bad record mac"):
            read_all(there, 100)


@given(garbage=st.binary(min_size=5, max_size=200))
def test_garbage_never_completes_a_handshake(garbage: bytes) -> None:
    there = TlsSession(CONTEXTS[1], is_server=True)
    there.received(memoryview(garbage))
    with suppress(TlsFailed):
        assert not there.handshake()


def test_the_end_of_a_session_is_told_after_all_bytes_sent() -> None:
    here, there = handshaken()
    here.write(memoryview(b"last"))
    here.end()
    there.received(memoryview(carried(here)))
    assert read_all(there, 100) == b"last"
    with pytest.raises(TlsEnded):
        read_all(there, 100)


def test_no_session_can_be_resumed() -> None:
    """A resumed session would skip the proof of identity."""
    assert CONTEXTS[1].num_tickets == 0


def test_one_write_encrypts_all() -> None:
    here, there = handshaken()
    data = random.Random(1).randbytes(300_000)
    here.write(memoryview(data))
    there.received(memoryview(carried(here)))
    assert read_all(there, len(data)) == data
