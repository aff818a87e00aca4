"""Without faults nearly all samples are used, however long a run goes on and however unlike its peers are."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from manyhands.optim.step.global_step import Statistics
from manyhands.testing import at
from tests.simulation.swarm_of_trainers import Member, Swarm, together
from tests.simulation.test_delay import quadratic, sgd
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

PACES_S = (0.5, 1.0, 2.0, 4.0)


@pytest.mark.long
@pytest.mark.parametrize("delay", few_of([None, "gradients"]), ids=["synchronous", "delayed"])
@pytest.mark.parametrize("join_period_s", few_of([9.0, 0.0]), ids=["one after the other", "together"])
@pytest.mark.parametrize(("num_peers", "num_steps"), few_of([(8, 15), (16, 50)]))
def test_nearly_all_samples_of_unlike_peers_are_used_over_many_steps(
    num_peers: int, num_steps: int, delay: str | None, join_period_s: float
) -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    swarm = Swarm(seed=11)
    link = swarm.world.network.default_link
    link.latency_s, link.jitter_s = 0.05, 0.02
    names = [f"p{number}" for number in range(num_peers)]
    target = 24 * num_peers
    counts: dict[str, Statistics] = {}

    def make_model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Linear(100, 100)

    def train(member: Member) -> None:
        pace_s, rng = PACES_S[int(member.name[1:]) % len(PACES_S)], random.Random(member.name)
        while member.optimizer.global_step < num_steps:
            member.step(quadratic(member.model), batch_s=pace_s * rng.uniform(0.8, 1.2))
            member.check_samples()
        member.optimizer.settle()
        counts[member.name] = member.optimizer.statistics

    def start(name: str) -> None:
        swarm.start(name, make_model, sgd, train, target_batch_size=target, batch_size_per_step=4, delay=delay)

    for number, name in enumerate(names):
        if number == 0 or join_period_s == 0:
            start(name)
        else:
            swarm.world.schedule(at(join_period_s * number).call(lambda name=name: start(name)))
    swarm.started.update(names)
    swarm.run(2000.0)

    used = sum(one.samples_used for one in counts.values())
    dropped = sum(one.samples_dropped for one in counts.values())
    assert used >= target * num_steps
    assert dropped <= 0.001 * used, {name: one for name, one in counts.items() if one.samples_dropped}
    waiting = sum(one.samples_computed for one in counts.values()) - used - dropped
    assert waiting <= 2 * target, "what waits for the step after the last one"
    assert all(one.steps_alone == 0 for name, one in counts.items() if name != "p0")
    if join_period_s == 0:
        assert dropped == 0
    assert f"{counts['p0'].samples_used} of them used" in counts["p0"].summary()


def test_the_share_of_a_peer_that_brings_more_than_it_may_count_for_is_that_of_what_counted() -> None:
    """A GPU beside three laptops: it counts for three of them, or as much as one while it is a guest."""
    swarm, num_steps, sizes = Swarm(seed=4), 6, {"p0": 4, "p1": 4, "p2": 4, "gpu": 64}

    def make_model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Linear(20, 20)

    def train(member: Member) -> None:
        together(len(sizes), member)
        for step in range(num_steps):
            member.step(quadratic(member.model))
            member.wait_for(step + 1)

    for name, size in sizes.items():
        swarm.start(name, make_model, sgd, train, target_batch_size=sum(sizes.values()), batch_size_per_step=size)
    swarm.run()
    counts = {name: member.optimizer.statistics for name, member in swarm.members.items()}
    (of_all,) = {one.samples_of_all for one in counts.values()}
    assert sum(one.samples_counted for one in counts.values()) == of_all
    gpu = counts["gpu"]
    assert gpu.samples_used == 64 * num_steps > of_all > gpu.samples_counted
    assert gpu.samples_counted == 12 * num_steps
    assert counts["p0"].samples_counted == counts["p0"].samples_used == 4 * num_steps


def test_the_summary_says_what_was_dropped() -> None:
    assert Statistics().summary() == "0 samples computed here so far"
    counts = Statistics(samples_computed=200, samples_used=196)
    assert counts.summary() == "200 samples computed here so far, 196 of them used (98.0%)"
    counts.samples_dropped = 4
    assert counts.summary() == "200 samples computed here so far, 196 of them used (98.0%), 4 dropped"
