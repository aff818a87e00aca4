"""Prepares msgspec types for decoding in several threads."""

from __future__ import annotations

from typing import Any

import msgspec


def make_ready(*kinds: Any) -> None:
    """Build msgspec's tables for types now, while the defining module is imported and only one thread does so.

    Otherwise msgspec builds them with the first message. If two threads, such as two peers of one process, then decode
    the same type for the first time, they see half-built tables and the process crashes (msgspec 0.22,
    ``tests/process/test_concurrent_decoding.py``).
    """
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)
