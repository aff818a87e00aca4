"""One peer averages for two runs at once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import pytest
import torch

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.rounds import CommittedRound, RoundRunner
from manyhands.base.errors import ConfigError
from manyhands.rpc import Endpoint, RpcConfig
from tests.averagers import close_all, join, sim_peers, step_all, weighted_mean
from tests.machine import Machine
from tests.network import ECHO, Text, endpoints, serve_echo
from tests.swarm import FixedMeeting

CONFIG = AveragingConfig(matchmaking_time_s=10.0, averaging_timeout_s=60.0, codec="none")
CAP_MBIT_S = 16.0
NUMEL = 300_000


def runners_of(run_id: str, members: Sequence[Endpoint]) -> list[RoundRunner]:
    """One for each member of a run; they expect each other."""
    return [
        RoundRunner(
            endpoint,
            run_id,
            b"same",
            FixedMeeting(endpoint, {other.peer_id: False for other in members if other is not endpoint}),
            CONFIG,
            random.Random(number),
        )
        for number, endpoint in enumerate(members)
    ]


async def average(
    runners: Sequence[RoundRunner], vectors: Sequence[torch.Tensor]
) -> tuple[float, list[CommittedRound]]:
    """When the last of them was done, by the monotonic clock, and the rounds."""
    rounds = [
        runner.average(vector_N, 1.0 + number)
        for number, (runner, vector_N) in enumerate(zip(runners, vectors, strict=True))
    ]
    results = await asyncio.gather(*rounds)
    return time.monotonic(), results


def check(vectors: Sequence[torch.Tensor], results: Sequence[CommittedRound]) -> None:
    """All hold the same bits, and they are the mean."""
    expected = weighted_mean(vectors, [1.0 + number for number in range(len(vectors))])
    for result in results:
        assert result.averaged_N is not None
        assert results[0].averaged_N is not None
        assert torch.equal(result.averaged_N, results[0].averaged_N)
        assert float((result.averaged_N.double() - expected).abs().max()) < 1e-6


async def test_two_rounds_at_once_share_the_upload_of_a_peer_that_is_in_both() -> None:
    """A group of four and a group of two: the one peer sends as much in both, over three streams and over one."""
    async with endpoints(5, kind="tls", config=RpcConfig(max_upload_mbit_s=CAP_MBIT_S)) as swarm:
        both, one, *_ = swarm
        serve_echo(one)
        runs = [runners_of("large", swarm[:4]), runners_of("small", [both, swarm[4]])]
        vectors = [
            [torch.randn(numel, generator=torch.Generator().manual_seed(number)) for number in range(len(runners))]
            for runners, numel in zip(runs, (NUMEL, NUMEL * 3 // 2), strict=True)
        ]
        before, began = both.bytes_sent, time.monotonic()
        rounds = asyncio.gather(*map(average, runs, vectors))
        calls_s: list[float] = []
        with Machine() as machine:
            while not rounds.done():
                called = time.monotonic()
                await both.call(one.peer_id, ECHO, Text("hi"))
                calls_s.append(time.monotonic() - called)
                await asyncio.sleep(0.01)
        (large_s, large), (small_s, small) = await rounds
        ended = [large_s - began, small_s - began]
        num_bytes = both.bytes_sent - before
        check(vectors[0], large)
        check(vectors[1], small)
        assert num_bytes > 2 * 1.4 * 4 * NUMEL
        assert max(ended) > 0.85 * num_bytes / (CAP_MBIT_S * 125_000), "they share the cap"
        assert min(ended) > 0.75 * max(ended), f"neither starves: {ended}"
        assert sorted(calls_s)[int(len(calls_s) * 0.99)] < machine.allows(0.25), "control is not held up"
        for runner in (runner for runners in runs for runner in runners):
            await runner.close()


async def test_a_run_has_one_runner_at_an_endpoint_and_its_end_touches_no_other_run() -> None:
    async with endpoints(2) as swarm:
        first, second = runners_of("first", swarm), runners_of("second", swarm)
        with pytest.raises(ConfigError, match="averages under run id 'first' already"):
            runners_of("first", swarm[:1])
        for runner in first:
            await runner.close()
        vectors = [torch.zeros(10), torch.ones(10)]
        check(vectors, (await average(second, vectors))[1])
        first = runners_of("first", swarm)
        check(vectors, (await average(first, vectors))[1])
        for runner in (*first, *second):
            await runner.close()


@pytest.mark.parametrize("kind", ["memory", "tls"])
async def test_two_averagers_of_one_peer_step_at_once(kind: str) -> None:
    """Three peers are in both runs; one of them has a third run to itself, and hears that nobody is there."""
    async with sim_peers(3, kind=kind) as peers:
        tensors = {
            run_id: [torch.randn(shape, generator=torch.Generator().manual_seed(number)) for number in range(3)]
            for run_id, shape in (("one", (70, 30)), ("two", (5,)))
        }
        before = {run_id: [tensor.clone() for tensor in each] for run_id, each in tensors.items()}
        runs = {
            run_id: [await join(peer, [tensor], run_id=run_id) for peer, tensor in zip(peers, each, strict=True)]
            for run_id, each in tensors.items()
        }
        alone = await join(peers[0], [torch.ones(3)], run_id="three")
        (nobody,), *results = await asyncio.gather(
            step_all([alone], timeout_s=3.0), *(step_all(averagers, [1.0, 2.0, 3.0]) for averagers in runs.values())
        )
        assert nobody.reason == "no other peer averages under run id 'three'"
        for run_id, ended in zip(runs, results, strict=True):
            assert all(result.committed and len(result.group) == 3 for result in ended), ended
            expected = weighted_mean(before[run_id], [1.0, 2.0, 3.0])
            for tensor in tensors[run_id]:
                torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=1e-6)
        await close_all([alone, *(averager for averagers in runs.values() for averager in averagers)])
