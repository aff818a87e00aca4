"""Whole runs that are too large for one group, in virtual time: the optimizer, with its DHT, and peers that fail.

Each batch of each peer pulls the parameters towards a point of its own, drawn around 1 in each dimension, so that what
a group finds shows whose gradients were in it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from manyhands.averaging.config import AveragingConfig
from manyhands.base.address import Address
from manyhands.base.identity import PeerId
from manyhands.optim.optimizer import Optimizer
from manyhands.peer import Presence
from manyhands.testing import Host, World
from manyhands.testing.blocking import SimPeer, run_blocking
from tests.phases import Phase, forget, on_phase
from tests.simulation.worlds import join

NUMEL = 32
BATCH_S = 2.0
BATCH_SIZE = 4
BATCHES_A_STEP = 8
"""Of each peer, so a step takes 16 s and its rounds."""
STEP_S = BATCH_S * BATCHES_A_STEP
RESTART_S = 3.0
FREEZE_S = STEP_S
START_PERIOD_S = 0.05
SETTLE_S = 2 * STEP_S
"""Nobody fails before all peers have come and know each other."""
LEARNING_RATE = 0.01


@dataclass
class GridRun:
    """What is seen of a run.

    Attributes:
        held: the parameters of each peer after each step that it made itself.
        grids: how many steps of peers ended in a grid of this name.
        waits_s: of each step and peer, how long its training loop stood still for it.
        matchmaking_s: of each round, from when a peer has come with its values until its group has formed.
        killed, frozen: how often somebody was.
        reloads: of the states that peers had to load, those that no failure explains, by the step that led there.
        computed, dropped: samples, of all who ran.
        reasons: why rounds of a step did not commit with some peer, and how often.
        told: how far apart the peers were told that they are.
        failed_at: when somebody failed last (virtual time).
    """

    num_peers: int
    held: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    grids: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    matchmaking_s: list[float] = field(default_factory=list)
    killed: int = 0
    frozen: int = 0
    reloads: Counter[int] = field(default_factory=Counter)
    dropped: int = 0
    computed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    told: list[float] = field(default_factory=list)
    failed_at: dict[str, float] = field(default_factory=dict)

    def disagreement(self, step: int) -> float:
        """The root mean square distance of those who made a step from their mean, as a fraction of its size."""
        stacked = torch.stack(list(self.held[step].values())).double()
        mean = stacked.mean(dim=0)
        return float((stacked - mean).square().sum(dim=1).mean().sqrt() / mean.norm())


def grid_run(seed: int, num_peers: int, max_group_size: int, p_fail: float) -> tuple[World, GridRun]:
    """A run, which goes on for as long as the world does.

    Args:
        p_fail: each peer fails with this probability in each ``STEP_S``: it is killed and started again, or frozen.
    """
    forget()  # what peers of an earlier run did
    world = World(seed)
    world.network.default_link.latency_s = 0.02
    world.network.default_link.jitter_s = 0.005
    run, rng = GridRun(num_peers), world.rng("failures")
    names = [f"p{number}" for number in range(num_peers)]
    initial_peers: list[Address] = []

    async def peer(host: Host) -> None:
        await asyncio.sleep(max(0.0, names.index(host.name) * START_PERIOD_S - world.loop.time()))
        own_rng = world.rng(f"{host.name} from {world.loop.time()}")
        presence = Presence(world.transport(host), rng=own_rng, wall_clock=host.wall_clock)
        try:
            await presence.endpoint.listen([Address.of(host.ip, 0)])
            await join(presence.dht, initial_peers)
            initial_peers.extend(presence.endpoint.addresses[: 3 - len(initial_peers)])
            await run_blocking(lambda: train(SimPeer(presence), host.name, own_rng))
        finally:
            await presence.stop()

    def train(sim_peer: SimPeer, name: str, own_rng: random.Random) -> None:
        parameter = torch.nn.Parameter(torch.ones(NUMEL))
        optimizer = Optimizer(
            torch.optim.AdamW([parameter], lr=LEARNING_RATE),
            peer=sim_peer,
            run_id="grid",
            target_batch_size=num_peers * BATCH_SIZE * BATCHES_A_STEP,
            batch_size_per_step=BATCH_SIZE,
            averaging=AveragingConfig(codec="none", max_group_size=max_group_size),
        )
        generator = torch.Generator().manual_seed(own_rng.getrandbits(32))
        counts, last_step, num_loaded = optimizer.statistics, optimizer.global_step, optimizer.statistics.states_loaded
        while True:
            sim_peer.sleep(BATCH_S * own_rng.uniform(0.8, 1.2))
            goal_N = 1.0 + torch.randn(NUMEL, generator=generator)
            parameter.grad = (parameter - goal_N).detach()
            before, num_dropped = sim_peer.time(), counts.samples_dropped
            optimizer.step()
            run.computed += BATCH_SIZE
            run.dropped += counts.samples_dropped - num_dropped
            if counts.states_loaded > num_loaded:
                num_loaded, last_step = counts.states_loaded, optimizer.global_step
                if world.loop.time() - run.failed_at.get(name, -math.inf) > FREEZE_S + 2 * STEP_S:
                    run.reloads[last_step] += 1
            elif optimizer.global_step > last_step:
                last_step = optimizer.global_step
                run.waits_s.append(sim_peer.time() - before)
                run.held.setdefault(last_step, {})[name] = parameter.detach().clone()
                if optimizer.last_round is not None:
                    run.grids[optimizer.last_round.position.group_key.rpartition(" ")[0]] += 1
                if counts.disagreement is not None:
                    run.told.append(counts.disagreement)

    def watch_rounds(peer_id: PeerId) -> None:
        came_at = 0.0

        def note(phase: Phase) -> None:
            nonlocal came_at
            if phase is Phase.JOINING:
                came_at = world.loop.time()
            elif phase is Phase.FORMED:
                run.matchmaking_s.append(world.loop.time() - came_at)

        on_phase(peer_id, note)

    def fail() -> None:
        for name in names:
            if rng.random() < p_fail and name not in run.failed_at.keys() - recovered():
                world.loop.call_later(rng.uniform(0.0, STEP_S), kill if rng.random() < 0.5 else freeze, name)
        world.loop.call_later(STEP_S, fail)

    def recovered() -> set[str]:
        return {name for name, at in run.failed_at.items() if world.loop.time() > at + FREEZE_S + STEP_S}

    def kill(name: str) -> None:
        run.killed += 1
        run.failed_at[name] = world.loop.time()
        world.kill(name)
        world.loop.call_later(RESTART_S, world.restart, name)

    def freeze(name: str) -> None:
        run.frozen += 1
        run.failed_at[name] = world.loop.time()
        world.freeze(name)
        world.loop.call_later(FREEZE_S, world.thaw, name)

    for name in names:
        watch_rounds(world.identity(name).peer_id)
        world.start(name, peer)
    if p_fail > 0:
        world.loop.call_at(num_peers * START_PERIOD_S + SETTLE_S, fail)
    return world, run


@contextmanager
def reasons_counted(run: GridRun) -> Iterator[None]:
    """Within the block, count why rounds of a step did not commit here, by what peers log."""

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if isinstance(record.args, tuple) and len(record.args) == 3:
                run.reasons[str(record.args[2]).partition("did not commit here: ")[2]] += 1

    logger, handler = logging.getLogger("manyhands.optim.run.step_rounds"), Counting()
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
