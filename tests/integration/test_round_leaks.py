"""Rounds that are broken off over real sockets, again and again: no file and no task stays behind."""

from __future__ import annotations

import asyncio
import random

import psutil
import torch

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position
from manyhands.averaging.rounds import RoundRunner
from manyhands.base.deadline import time_limit
from manyhands.rpc import Endpoint
from tests.network import PATIENCE_S
from tests.swarm import FixedMeeting, averagers

CONFIG = AveragingConfig(matchmaking_time_s=0.3, averaging_timeout_s=5.0)
NUM_ROUNDS = 16


def num_held(members: list[tuple[RoundRunner, FixedMeeting, Endpoint]]) -> int:
    """Streams that are open now and known; each is one file."""
    return sum(endpoint.num_streams for _, _, endpoint in members)


def is_round_running() -> bool:
    """Whether a task of a round has not ended yet."""
    return any(task.get_name().startswith("rounds: ") for task in asyncio.all_tasks())


async def test_rounds_that_are_broken_off_leave_no_file_open() -> None:
    rng = random.Random(3)
    vector = torch.ones(5_000)
    process = psutil.Process()
    async with averagers(3, kind="tls", config=CONFIG, in_doubt_s=0.1) as members:
        files = process.num_fds() - num_held(members)
        for step in range(NUM_ROUNDS):
            rounds = [asyncio.ensure_future(averager.average(vector, 1.0)) for averager, _, _ in members]
            for _ in range(rng.randrange(250)):
                await asyncio.sleep(0)
            rng.choice(rounds).cancel()
            async with time_limit(PATIENCE_S, "waiting for the rounds to end"):
                await asyncio.gather(*rounds, return_exceptions=True)
                # two control connections; two kept bulk streams, and two of an earlier order of ranks
                while is_round_running() or any(endpoint.num_streams > 6 for _, _, endpoint in members):
                    await asyncio.sleep(0.01)
            for _, meeting, _ in members:
                meeting.missing.clear()
                meeting.at = Position(step + 1, b"start")  # some may have committed, and wait for no attempt here
        async with time_limit(PATIENCE_S, "waiting for the files of broken rounds to be closed"):
            while process.num_fds() - num_held(members) > files:
                await asyncio.sleep(0.01)
        results = await asyncio.gather(*(averager.average(vector, 1.0) for averager, _, _ in members))
        assert all(result.averaged_N is not None for result in results)
