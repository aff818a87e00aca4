"""A run in one group that is too large for every peer to read the records of all.

The limits are lowered, so that twelve trainers are a large run; those that hold the records themselves know all.
"""

from __future__ import annotations

import statistics
from collections import Counter

import pytest

from manyhands.dht import DhtNode, Part
from manyhands.optim.run import progress, tracker
from manyhands.testing import at
from tests.simulation.swarm_of_trainers import Member, Swarm, together
from tests.simulation.test_delay import quadratic, sgd
from tests.simulation.test_drop_in import new_model

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_PEERS = 12
NUM_STEPS = 14
TARGET = NUM_PEERS * 8 * 8


@pytest.fixture
def num_parts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Make a run of more than 5 peers a large one; returns how many parts were read, of few records and of all."""
    monkeypatch.setattr(progress, "CROWD", 4)
    monkeypatch.setattr(tracker, "LARGE", 5)
    monkeypatch.setattr(tracker, "SAMPLE", 3)
    monkeypatch.setattr(tracker, "NUM_LEADERS", 3)
    counts: Counter[str] = Counter()
    get_part = DhtNode.get_part

    async def counted(self: DhtNode, key: str, most: int) -> Part:
        part = await get_part(self, key, most)
        counts["of all" if part.num_shown == part.num_held else "of few"] += 1
        return part

    monkeypatch.setattr(DhtNode, "get_part", counted)
    return counts


def run_of(num_peers: int, *, killed: str = "", late: bool = False) -> tuple[dict[int, float], dict[str, Member]]:
    """Run trainers until step ``NUM_STEPS``; returns the samples of each step, and the trainers."""
    sizes: dict[int, float] = {}

    def train(member: Member) -> None:
        if member.name != "late":
            together(num_peers, member)
        while member.optimizer.global_step < NUM_STEPS:
            before = member.optimizer.global_step
            member.step(quadratic(member.model), batch_s=0.4 + 0.05 * (len(member.name) + ord(member.name[-1]) % 5))
            manifest = member.optimizer.last_round
            if member.optimizer.global_step > before and manifest is not None:
                sizes[member.optimizer.global_step] = sum(manifest.weights)
        member.check_samples()

    swarm = Swarm()
    options = {"target_batch_size": TARGET, "batch_size_per_step": 8}
    for number in range(num_peers):
        swarm.start(f"p{number:x}", new_model, sgd, train, **options)
    if late:
        swarm.start("late", new_model, sgd, train, begins_s=30.0, **options)
    if killed:
        swarm.started.discard(killed)
        swarm.world.schedule(at(30.0).kill(killed))
    swarm.run()
    return sizes, swarm.members


@pytest.mark.long
def test_members_that_know_a_sample_come_when_the_leader_calls_and_a_newcomer_takes_part(
    num_parts: Counter[str],
) -> None:
    sizes, members = run_of(NUM_PEERS, late=True)
    assert num_parts["of few"] > NUM_STEPS
    assert 1.0 <= statistics.median(sizes.values()) / TARGET < 1.35
    newcomer = members.pop("late").optimizer
    assert newcomer.global_step == NUM_STEPS
    assert newcomer.statistics.rounds_committed >= 2
    for member in members.values():
        assert member.optimizer.statistics.rounds_committed >= NUM_STEPS - 1
        assert member.optimizer.statistics.samples_dropped == 0


@pytest.mark.long
def test_the_run_goes_on_when_a_peer_that_is_to_lead_has_died(num_parts: Counter[str]) -> None:
    sizes, members = run_of(NUM_PEERS, killed="p3")
    assert num_parts["of few"] > NUM_STEPS
    assert max(sizes) == NUM_STEPS
    assert sum(member.optimizer.statistics.rounds_committed >= NUM_STEPS - 3 for member in members.values()) >= 9
