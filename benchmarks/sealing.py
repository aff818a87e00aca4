"""Cost of encryption alone, without sockets: CPU seconds per GiB, with TLS and with the records of bulk streams.

    python benchmarks/sealing.py

One process, one core, chunks of the size that bulk streams use. The two take turns, chunk by chunk.
"""

from __future__ import annotations

import json
import os
import time

from manyhands.base.identity import Identity
from manyhands.transport.chunks import CHUNK_BYTES
from manyhands.transport.sealing import RECORD_EXTRA_BYTES
from manyhands.transport.tls_session import TlsSession, tls_context

NUM_CHUNKS = 1024


def handshaken() -> tuple[TlsSession, TlsSession]:
    """Both ends of a session."""
    ends = [TlsSession(tls_context(Identity.generate(), is_server=s), is_server=s) for s in (False, True)]
    done = [False, False]
    while not all(done):
        for number in (0, 1):
            done[number] = ends[number].handshake()
            ends[1 - number].received(memoryview(ends[number].ciphertext()))
    return ends[0], ends[1]


def main() -> None:
    here, there = handshaken()
    sealer, opener = here.sealing()[0], there.sealing()[1]
    plaintext, received = memoryview(os.urandom(CHUNK_BYTES)), memoryview(bytearray(CHUNK_BYTES))
    record = memoryview(bytearray(CHUNK_BYTES + RECORD_EXTRA_BYTES))
    spent = dict.fromkeys(["tls_encrypt", "tls_take", "tls_put", "tls_decrypt", "seal", "open"], 0.0)
    for _ in range(NUM_CHUNKS):
        times = [time.process_time()]
        here.write(plaintext)
        times.append(time.process_time())
        ciphertext = here.ciphertext(2 * CHUNK_BYTES)
        times.append(time.process_time())
        there.received(memoryview(ciphertext))
        times.append(time.process_time())
        num_read = there.read_into(received)
        times.append(time.process_time())
        assert (num_read, received) == (CHUNK_BYTES, plaintext)
        received[:] = bytes(CHUNK_BYTES)
        times.append(time.process_time())
        sealer.seal_into(plaintext, record)
        times.append(time.process_time())
        opener.open_into(record, received)
        times.append(time.process_time())
        assert received == plaintext
        for number, name in enumerate(spent):
            begin = number if number < 4 else number + 1
            spent[name] += times[begin + 1] - times[begin]
    num_gib = NUM_CHUNKS * CHUNK_BYTES / (1 << 30)
    print(json.dumps({f"{name}_cpu_s_per_gib": round(seconds / num_gib, 3) for name, seconds in spent.items()}))


if __name__ == "__main__":
    main()
