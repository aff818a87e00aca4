"""What threads of several peers in one process read with."""

from __future__ import annotations

from typing import Any

import msgspec


def make_ready(*kinds: Any) -> None:
    """Have msgspec look into types now, while one thread does: the module that defines them is imported.

    Else it does so when the first message comes. Two threads that begin to read one kind at the same time, as two peers
    in one process do, then see each other's half-made tables, and the process dies (msgspec 0.22,
    ``tests/process/test_ready_structs.py``).
    """
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)
