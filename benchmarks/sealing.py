"""Cost of encrypting bulk data: plain TCP, blocking TLS of the standard library, and the records of bulk streams.

    python benchmarks/sealing.py

One process sends 2 GiB over the loopback interface, from one thread to another, in chunks of the size that bulk streams
use. The three take turns. Of each: CPU seconds for each GiB, both ends and the system's TCP together, and GiB/s of wall
time. CPU seconds hardly depend on what else the machine does; wall times do.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable

from manyhands.base.identity import Identity
from manyhands.transport.chunks import CHUNK_BYTES
from manyhands.transport.sealed_stream import NEAR_BYTES
from manyhands.transport.sealing import RECORD_EXTRA_BYTES, SECRET_BYTES, Opener, RecordBuffer, Sealer
from manyhands.transport.tls_session import tls_context

NUM_CHUNKS = 8192
GIB = 1 << 30
NUM_TURNS = 5

SECRET = os.urandom(SECRET_BYTES)
SERVER, CLIENT = (tls_context(Identity.generate(), is_server=is_server) for is_server in (True, False))


def send_plain(sock: socket.socket, chunk: memoryview) -> None:
    for _ in range(NUM_CHUNKS):
        sock.sendall(chunk)


def receive_plain(sock: socket.socket, view: memoryview) -> None:
    for _ in range(NUM_CHUNKS):
        num_bytes = 0
        while num_bytes < len(view):
            num_bytes += sock.recv_into(view[num_bytes:])


def send_tls(sock: socket.socket, chunk: memoryview) -> None:
    with CLIENT.wrap_socket(sock) as tls:
        send_plain(tls, chunk)


def receive_tls(sock: socket.socket, view: memoryview) -> None:
    with SERVER.wrap_socket(sock, server_side=True) as tls:
        receive_plain(tls, view)


def send_sealed(sock: socket.socket, chunk: memoryview) -> None:
    sealer = Sealer(SECRET)
    record = memoryview(bytearray(NEAR_BYTES + RECORD_EXTRA_BYTES))
    for _ in range(NUM_CHUNKS):
        for start in range(0, len(chunk), NEAR_BYTES):
            sock.sendall(record[: sealer.seal_into(chunk[start : start + NEAR_BYTES], record)])


def receive_sealed(sock: socket.socket, view: memoryview) -> None:
    records = RecordBuffer(Opener(SECRET))
    for _ in range(NUM_CHUNKS):
        num_bytes = 0
        while num_bytes < len(view):
            if records.is_ready:
                num_bytes += records.take_into(view[num_bytes:])
            else:
                records.added(sock.recv_into(records.room()))


End = Callable[[socket.socket, memoryview], None]


def transfer(send: End, receive: End) -> tuple[float, float]:
    """Return the CPU seconds and the wall seconds for each GiB."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here = socket.create_connection(listening.getsockname())
        there, _ = listening.accept()
    plaintext = memoryview(os.urandom(CHUNK_BYTES))
    received = memoryview(bytearray(CHUNK_BYTES))
    with here, there:
        receiver = threading.Thread(target=receive, args=(there, received))
        cpu, wall = time.process_time(), time.perf_counter()
        receiver.start()
        send(here, plaintext)
        receiver.join()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert received == plaintext
    num_gib = NUM_CHUNKS * CHUNK_BYTES / GIB
    return cpu / num_gib, wall / num_gib


def main() -> None:
    kinds: dict[str, tuple[End, End]] = {
        "plain TCP": (send_plain, receive_plain),
        "blocking TLS": (send_tls, receive_tls),
        "sealed records": (send_sealed, receive_sealed),
    }
    turns = [{kind: transfer(*ends) for kind, ends in kinds.items()} for _ in range(NUM_TURNS)]
    for kind in kinds:
        cpu_s = statistics.median(turn[kind][0] for turn in turns)
        wall_s = statistics.median(turn[kind][1] for turn in turns)
        print(json.dumps({"kind": kind, "cpu_s_per_gib": round(cpu_s, 2), "gib_per_s": round(1 / wall_s, 2)}))


if __name__ == "__main__":
    main()
