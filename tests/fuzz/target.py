"""What a fuzz target is, and what counts as its failure."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import msgspec

from manyhands.base.errors import PeerError, PeerLost, ProtocolViolation
from manyhands.base.identity import PeerId
from manyhands.rpc.frames import UNREADABLE
from manyhands.transport import Stream

MAX_CPU_S = 1.0
"""For one input of at most 1 MiB, on a slow machine; most take microseconds."""
MAX_MESSAGE_LENGTH = 4000
"""What an error about another peer may put into the log."""
REMOTE = PeerId("12D3KooWHostile")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One decoder, with all that is done with its value before anybody trusts it.

    Attributes:
        name: as on the command line; also the folder of its corpus.
        seeds: valid inputs.
        run: takes one input; returns, or raises one of ``errors``.
        errors: the errors that are documented for bad input.
        kind: how the seeds are mutated.
        tokens: for texts: what is put into them.
        is_framed: the input follows four bytes with its length.
        max_bytes: memory that one input may need.
        weight: its part in the short run of the tests, relative to the others.
    """

    name: str
    seeds: Sequence[bytes]
    run: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    kind: Literal["msgpack", "text", "bytes"] = "msgpack"
    tokens: Sequence[str] = field(default=())
    is_framed: bool = False
    max_bytes: int = 64 << 20
    weight: float = 1.0


def fault_in(target: Target, data: bytes, *, traced: bool = False) -> str | None:
    """What is wrong with how a target takes one input, or None.

    Args:
        traced: also measure the memory, which takes several times as long.
    """
    if traced:
        tracemalloc.start()
    began = time.thread_time()
    try:
        target.run(data)
    except target.errors as error:
        fault = _fault_of_message(error)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the finding)
        fault = f"raised {type(error).__name__}, which is not documented: {str(error)[:300]}"
    else:
        fault = None
    finally:
        spent_s = time.thread_time() - began
        peak = tracemalloc.get_traced_memory()[1] if traced else 0
        if traced:
            tracemalloc.stop()
    if fault is None and spent_s > MAX_CPU_S and not traced:
        fault = f"took {spent_s:.2f} s; {MAX_CPU_S} s are allowed"
    if fault is None and peak > target.max_bytes:
        fault = f"needed {peak >> 20} MiB; {target.max_bytes >> 20} MiB are allowed"
    return fault


def _fault_of_message(error: Exception) -> str | None:
    """What another peer wrote must not fill the log, nor steer a terminal."""
    message = str(error)
    if not isinstance(error, PeerError):
        return None
    if len(message) > MAX_MESSAGE_LENGTH:
        return f"raised {type(error).__name__} with a message of {len(message)} characters"
    if not message.isprintable():
        return f"raised {type(error).__name__} with unprintable characters in its message: {message[:200]!r}"
    return None


class ByteStream:
    """A stream on which some bytes arrive, and then its end; nothing on it ever waits."""

    def __init__(self, data: bytes) -> None:
        self.remote = REMOTE
        self.remote_host = "203.0.113.7"
        self._left = memoryview(data)

    async def receive_into(self, view: memoryview) -> None:
        if len(self._left) < len(view):
            raise PeerLost(self.remote, "connection closed")
        view[:] = self._left[: len(view)]
        self._left = self._left[len(view) :]

    async def receive(self) -> bytes:
        if not self._left:
            raise PeerLost(self.remote, "connection closed")
        taken, self._left = bytes(self._left[:4096]), self._left[4096:]
        return taken


def stream_of(data: bytes) -> Stream:
    """A stream on which some bytes arrive."""
    return cast("Stream", ByteStream(data))


def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never waits, without a loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise AssertionError("it waits for something that never comes")


def decoded(raw: bytes, kind: type[Any]) -> Any:
    """Decode the body of a call or the header of a stream, as the library does.

    Raises:
        ProtocolViolation: it cannot be read.
    """
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except UNREADABLE as error:
        raise ProtocolViolation(REMOTE, "it cannot be read") from error
