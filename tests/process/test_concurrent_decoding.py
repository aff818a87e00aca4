"""Threads of several peers may begin to read one kind of message at the same moment."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

PROGRAM = """
import sys, threading
import msgspec
from manyhands.rpc.method import Method

sys.setswitchinterval(1e-6)
kinds = []
for number in range(300):
    inner = msgspec.defstruct(f"Inner{number}", [("a", int), ("b", list[str])])
    kind = msgspec.defstruct(f"Kind{number}", [("x", int), ("y", list[inner]), ("z", dict[str, inner])])
    Method(f"part.verb{number}", kind, inner)
    kinds.append(kind)
gate = threading.Barrier(6)

def read():
    for kind in kinds:
        gate.wait()
        msgspec.msgpack.decode(msgspec.msgpack.encode({"x": 1, "y": [], "z": {}}), type=kind)

threads = [threading.Thread(target=read) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_message_types_are_prepared_before_threads_decode_them() -> None:
    """Without that msgspec ends this program with SIGSEGV each time."""
    assert subprocess.run([sys.executable, "-c", PROGRAM], timeout=60, check=False).returncode == 0
