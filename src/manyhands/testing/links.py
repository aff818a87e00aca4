"""Simulated links between machines: the delay of each direction, and bandwidths that streams share."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from manyhands.testing.virtual_loop import VirtualLoop

RETRANSMISSION_S = 0.2
TURN_BYTES = 64 * 1024


@dataclass
class Link:
    """One direction between two hosts.

    Attributes:
        latency_s: one way.
        jitter_s: maximum additional delay, uniformly distributed.
        loss: probability that a chunk is lost and sent again.
        num_blocks: number of active faults that block it; while there is one, nothing arrives.
    """

    latency_s: float = 0.0005
    jitter_s: float = 0.0
    loss: float = 0.0
    num_blocks: int = 0
    _held: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)

    def delay_s(self, rng: random.Random) -> float:
        """Delay of the next chunk."""
        delay_s = self.latency_s
        if self.jitter_s:
            delay_s += self.jitter_s * rng.random()
        while self.loss and rng.random() < self.loss:
            delay_s += RETRANSMISSION_S
        return delay_s

    def hold(self, arrive: Callable[..., None], *args: Any) -> None:
        """Keep a packet until the link is unblocked."""
        self._held.append((arrive, args))

    def unblock(self) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
        """Remove one block; returns the held packets if it was the last one."""
        self.num_blocks = max(0, self.num_blocks - 1)
        if self.num_blocks:
            return []
        held, self._held = self._held, []
        return held


class Pipe:
    """A bandwidth that streams share fairly, in turns of 64 KiB, however much each has to send.

    Source: Shreedhar and Varghese, Efficient Fair Queuing Using Deficit Round-Robin (without carrying a deficit over).

    Attributes:
        bytes_per_s: the rate.
        is_limited: False until a limit is set; then packets pass at once without :meth:`enter`.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.bytes_per_s = float("inf")
        self.is_limited = False
        self._loop = loop
        self._queues: dict[object, deque[tuple[int, Callable[[], None]]]] = {}
        self._turn_bytes = TURN_BYTES
        self._is_busy = False

    def limit(self, bytes_per_s: float) -> None:
        """Set the rate."""
        self.bytes_per_s = bytes_per_s
        self.is_limited = True

    def enter(self, stream: object, num_bytes: int, passed: Callable[[], None]) -> None:
        """Call ``passed`` when ``num_bytes`` of a stream have gone through, after its earlier bytes."""
        self._queues.setdefault(stream, deque()).append((num_bytes, passed))
        if not self._is_busy:
            self._transmit_next()

    def _transmit_next(self) -> None:
        stream, queue = next(iter(self._queues.items()))
        num_bytes, passed = queue.popleft()
        self._turn_bytes -= num_bytes
        if not queue or self._turn_bytes <= 0:
            self._turn_bytes = TURN_BYTES
            del self._queues[stream]
            if queue:
                self._queues[stream] = queue  # move it to the end
        self._is_busy = True
        self._loop.call_outside(self._loop.now + num_bytes / self.bytes_per_s, self._transmitted, passed)

    def _transmitted(self, passed: Callable[[], None]) -> None:
        self._is_busy = False
        if self._queues:
            self._transmit_next()
        passed()
