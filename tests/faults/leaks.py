"""Rounds that fail in one process, one after the other, over loopback: what do they leave behind?"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, replace

import psutil
import torch

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.rounds import CommittedRound, RoundRunner
from manyhands.base.deadline import time_limit
from manyhands.rpc import Endpoint
from tests.swarm import FixedMeeting, averagers

Members = list[tuple[RoundRunner, FixedMeeting, Endpoint]]


@dataclass(frozen=True)
class Kept:
    """What the process holds between two rounds.

    Attributes:
        memory_mb: that somebody has asked the C library for and not given back, or all of it where that is not known:
            what is free in its arenas, a few hundred megabytes with so many threads, is no leak.
    """

    num_files: int
    num_tasks: int
    num_vectors: int
    memory_mb: float


CONFIG = AveragingConfig(matchmaking_time_s=0.5, averaging_timeout_s=10.0, codec="none")
NUM_SWARMS = 5
"""At once, in one process: most of a round that fails is waiting."""
NUM_MEMBERS = 4
NUMEL = 250_000
LONGEST_S = 0.15
"""From the begin of a round to the fault, at most."""
NUM_WARM_UP = 10
"""Rounds of each swarm before anything is counted."""
NUM_ROUNDS = 40
"""Of each swarm that must fail."""
END_S = 60.0
SETTLE_S = 12.0
"""A stream that came for a round which had ended here is closed when that round's time is over."""
MAX_MORE = Kept(4, 0, 2, 25.0)
"""A vector has 1 MB, so 200 of them would be seen."""


def kept() -> Kept:
    """As of now."""
    gc.collect()
    vectors = sum(type(thing) is torch.Tensor and thing.numel() == NUMEL for thing in gc.get_objects())
    return Kept(psutil.Process().num_fds(), len(asyncio.all_tasks()), vectors, memory_mb())


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def memory_mb() -> float:
    """What the C library has given out, where it says so; else all memory of the process."""
    look = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if look is None:
        return psutil.Process().memory_info().rss / 1e6
    look.restype = _MallInfo
    info = look()
    return (info.uordblks + info.hblkhd) / 1e6


def problem_of(before: Kept, after: Kept) -> str:
    """What there is too much of, in words; empty if there is not."""
    more = {field.name: getattr(after, field.name) - getattr(before, field.name) for field in fields(Kept)}
    return "; ".join(f"{name} grew by {num:g}" for name, num in more.items() if num > getattr(MAX_MORE, name))


async def measure(seed: int = 1) -> tuple[Kept, Kept, int]:
    """What is held before ``NUM_SWARMS * NUM_ROUNDS`` rounds that fail, and after them, and how many rounds it took.

    Some are faster than the fault. Memory and vectors are those of swarms that live; files and tasks are counted before
    these are there, and when they are closed: in between there are connections, now more, now fewer.
    """
    outside = kept()
    async with AsyncExitStack() as stack:
        swarms = [
            await stack.enter_async_context(
                averagers(NUM_MEMBERS, kind="tls", config=CONFIG, stream_s=0.5, in_doubt_s=0.1)
            )
            for _ in range(NUM_SWARMS)
        ]
        rngs = [random.Random(seed + number) for number in range(NUM_SWARMS)]
        await asyncio.gather(*(fail(NUM_WARM_UP, *each) for each in zip(swarms, rngs, strict=True)))
        await asyncio.sleep(SETTLE_S)
        before = kept()
        num_made = await asyncio.gather(*(fail(NUM_ROUNDS, *each) for each in zip(swarms, rngs, strict=True)))
        await asyncio.sleep(SETTLE_S)
        after = kept()
    closed = kept()
    before = replace(before, num_files=outside.num_files, num_tasks=outside.num_tasks)
    return before, replace(after, num_files=closed.num_files, num_tasks=closed.num_tasks), sum(num_made)


async def fail(num_rounds: int, members: Members, rng: random.Random) -> int:
    """Make rounds until so many have failed: two of four break off at a random moment, so nobody may commit."""
    vector_N = torch.ones(NUMEL)
    num_failed = num_made = 0
    while num_failed < num_rounds:
        async with time_limit(END_S, "for a round to end"):
            rounds = [asyncio.ensure_future(runner.average(vector_N, 1.0)) for runner, _, _ in members]
            await asyncio.sleep(rng.uniform(0.0, LONGEST_S))
            for task in rng.sample(rounds, 2):
                task.cancel()
            results = await asyncio.gather(*rounds, return_exceptions=True)
            while any(len(runner._tasks) for runner, _, _ in members):  # noqa: SLF001 (other swarms run beside it)
                await asyncio.sleep(0.01)
        num_made += 1
        num_failed += not any(isinstance(result, CommittedRound) for result in results)
        for _, roster, _ in members:
            roster.missing.clear()
    return num_made
