"""What a defence costs an all-reduce: the same vector by each of them in turn, among real peers in this process."""

from __future__ import annotations

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from _roster import Everybody

from manyhands import Peer
from manyhands.averaging import AveragingConfig
from manyhands.averaging.averager_presence import next_position
from manyhands.averaging.config import CENTERED_CLIP, CLIP, MEAN
from manyhands.averaging.round.limits import MemberLimits
from manyhands.averaging.rounds import CommittedRound, RoundMeter, RoundRunner

NUMEL = 1_000_000
NUM_ROUNDS = 7
TIMEOUT_S = 120.0
DEFENCES = (MEAN, CLIP, CENTERED_CLIP)


class Round(NamedTuple):
    """CPU seconds of all peers in a round, and the bytes that they send."""

    seconds: float
    num_bytes: int


class Cost(NamedTuple):
    """What an all-reduce takes, as a share of one without any defence, less 1.

    Attributes:
        time: CPU time of all peers, encryption included; the median over rounds.
        bytes: on all streams.
    """

    time: float
    bytes: float


def costs(num_peers: int) -> dict[str, Cost]:
    """The cost of each defence in a group of so many peers, which average a million values with 8 bits each."""
    peers = [Peer(listen=["/ip4/127.0.0.1/tcp/0"]) for _ in range(num_peers)]
    try:
        _connect(peers)
        groups = {name: _runners(peers, name) for name in ("", *DEFENCES)}
        for runners in groups.values():  # kernels are compiled, and streams opened
            _round(peers, runners)
        rounds = [{name: _round(peers, runners) for name, runners in groups.items()} for _ in range(NUM_ROUNDS)]
    finally:
        for peer in peers:
            peer.close()
    clean = [turn for turn in rounds if all(turn.values())]
    assert clean, "in each turn a peer was too late for a round: this machine is too busy"

    def share(name: str, field: str) -> float:
        ratios = [float(getattr(turn[name], field) / getattr(turn[""], field)) for turn in clean]
        return statistics.median(ratios) - 1

    return {name: Cost(round(share(name, "seconds"), 3), round(share(name, "num_bytes"), 4)) for name in DEFENCES}


def _connect(peers: list[Peer]) -> None:
    """Have all peers know each other, one pair after the other: in a round all would dial at once, on few cores."""
    for number, peer in enumerate(peers):
        for other in peers[:number]:
            peer.run(peer.endpoint.connect(other.endpoint.addresses[0]), TIMEOUT_S, "connecting")


def _runners(peers: list[Peer], name: str) -> list[tuple[RoundRunner, Everybody]]:
    """One averager of each peer; without a name nobody measures or checks values, as with ``manyhands.Averager``."""
    config = AveragingConfig(averaging_timeout_s=TIMEOUT_S, codec="int8", aggregate=name or MEAN)
    limits = MemberLimits() if name else None

    async def start(peer: Peer) -> tuple[RoundRunner, Everybody]:
        others = [one.endpoint for one in peers if one is not peer]
        for other in others:
            peer.endpoint.learn(other.peer_id, other.addresses)
        meeting = Everybody(peer.endpoint, {one.peer_id: False for one in others}, may_leave=True)
        runner = RoundRunner(peer.endpoint, f"run {name}", b"", meeting, config, random.Random(), limits)
        peer.presence.on_close.append(runner.close)
        return runner, meeting

    return [peer.run(start(peer), TIMEOUT_S, "starting") for peer in peers]


def _round(peers: list[Peer], runners: list[tuple[RoundRunner, Everybody]]) -> Round | None:
    """Average once; None if a peer was too late."""
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(NUMEL, generator=generator) for _ in peers]
    meters = [RoundMeter() for _ in peers]

    def average(number: int) -> CommittedRound:
        (runner, _), vector = runners[number], vectors[number]
        averaging = runner.average(
            vector, 1.0, shapes=[(1000, NUMEL // 1000)], meter=meters[number], refill=vector.clone
        )
        return peers[number].run(averaging, TIMEOUT_S, "averaging")

    with ThreadPoolExecutor(len(peers)) as pool:
        began = time.process_time()
        committed = list(pool.map(average, range(len(peers))))
        seconds = time.process_time() - began
    for (_, meeting), one in zip(runners, committed, strict=True):
        meeting.at = next_position(one.manifest.position, one.manifest)
    is_clean = not any(one.blamed for one in committed)
    return Round(seconds, sum(meter.num_bytes_sent for meter in meters)) if is_clean else None
