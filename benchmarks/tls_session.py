"""What TLS itself costs, without sockets: CPU seconds for each GiB of encrypting, decrypting, and the copies between.

    python benchmarks/tls_session.py

One process, one core, chunks of the size that bulk streams use.
"""

from __future__ import annotations

import json
import os
import time

from manyhands.base.identity import Identity
from manyhands.transport.chunks import CHUNK_BYTES
from manyhands.transport.tls_session import TlsSession, tls_context

NUM_CHUNKS = 1024


def handshaken() -> tuple[TlsSession, TlsSession]:
    """A session's two ends."""
    ends = [TlsSession(tls_context(Identity.generate(), is_server=s), is_server=s) for s in (False, True)]
    done = [False, False]
    while not all(done):
        for number in (0, 1):
            done[number] = ends[number].handshake()
            ends[1 - number].received(memoryview(ends[number].ciphertext()))
    return ends[0], ends[1]


def main() -> None:
    here, there = handshaken()
    plaintext, received = memoryview(os.urandom(CHUNK_BYTES)), memoryview(bytearray(CHUNK_BYTES))
    ciphertext = memoryview(bytearray(2 * CHUNK_BYTES))
    spent = dict.fromkeys(["encrypt", "take_ciphertext", "put_ciphertext", "decrypt"], 0.0)
    for _ in range(NUM_CHUNKS):
        times = [time.process_time()]
        here.write(plaintext)
        times.append(time.process_time())
        num_bytes = here.ciphertext_into(ciphertext)
        times.append(time.process_time())
        there.received(ciphertext[:num_bytes])
        times.append(time.process_time())
        num_read = there.read_into(received)
        times.append(time.process_time())
        assert num_read == CHUNK_BYTES
        for number, name in enumerate(spent):
            spent[name] += times[number + 1] - times[number]
    assert received == plaintext
    num_gib = NUM_CHUNKS * CHUNK_BYTES / (1 << 30)
    print(json.dumps({f"{name}_cpu_s_per_gib": round(seconds / num_gib, 3) for name, seconds in spent.items()}))


if __name__ == "__main__":
    main()
