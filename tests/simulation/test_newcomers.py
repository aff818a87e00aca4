"""A newcomer on a slow line takes part, although the run goes on while it downloads the state; in virtual time."""

from __future__ import annotations

import logging

import pytest
import torch

from manyhands.averaging.roster import lineage_of
from manyhands.optim.local_steps import LocalSteps
from manyhands.optim.step.replica import Replica
from manyhands.peer import Presence
from tests.simulation.newcomers import NEWCOMER, joined
from tests.simulation.swarm_of_trainers import Member, Swarm

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)


def test_a_newcomer_contributes_in_the_first_step_after_its_download_though_five_were_made_meanwhile() -> None:
    run = joined("int8", 5.0)
    newcomer = run.swarm.members[NEWCOMER].optimizer
    peer_id = run.swarm.world.identity(NEWCOMER).peer_id
    assert run.joined_at.step >= 2 + 5
    assert run.compared_at == run.joined_at
    assert newcomer.statistics.states_loaded == 1
    first = min(step for step, contributors in run.contributors.items() if peer_id in contributors)
    assert first <= run.joined_at.step + 2, "the step that had begun when it joined, or the one that began then"
    assert all(len(digests) == 1 for digests in run.digests.values())
    replicas = [member.optimizer.replica for member in run.swarm.members.values()]
    assert all(replica.position.lineage == lineage_of(replica.seal, replica.roster) for replica in replicas)
    assert all(peer_id in replica.roster.standings for replica in replicas)
    assert all(replica.roster.round == replica.position.step for replica in replicas)


@pytest.mark.parametrize("local_steps", [LocalSteps(), LocalSteps(fragments=2)], ids=["whole", "fragments"])
def test_with_local_steps_a_newcomer_makes_the_outer_steps_since_its_download_itself(local_steps: LocalSteps) -> None:
    run = joined("int8", 3.0, local_steps=local_steps)
    newcomer = run.swarm.members[NEWCOMER].optimizer
    peer_id = run.swarm.world.identity(NEWCOMER).peer_id
    assert run.joined_at.step >= 2 + 3
    assert newcomer.statistics.states_loaded == 1
    assert min(step for step, peers in run.contributors.items() if peer_id in peers) <= run.joined_at.step + 3
    assert all(len(digests) == 1 for digests in run.digests.values())


@pytest.mark.long
def test_so_does_one_whose_line_takes_more_than_half_of_a_step_for_its_means_after_it_has_made_a_few_more() -> None:
    run = joined("fp16", 5.0, 140.0)
    newcomer = run.swarm.members[NEWCOMER].optimizer
    assert newcomer.statistics.states_loaded == 1
    peer_id = run.swarm.world.identity(NEWCOMER).peer_id
    assert min(step for step, contributors in run.contributors.items() if peer_id in contributors) <= (
        run.joined_at.step + 4
    )
    assert all(len(digests) == 1 for digests in run.digests.values())


@pytest.mark.long
def test_without_kept_steps_it_loads_the_state_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what the steps are kept for."""
    monkeypatch.setattr(Replica, "can_replay", False)
    run = joined("int8", 5.0)
    assert run.contributed_at_s is None
    assert run.swarm.members[NEWCOMER].optimizer.statistics.states_loaded >= 3


def new_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(3, 3)


@pytest.mark.long
def test_a_newcomer_whose_link_drops_right_after_it_has_joined_begins_no_branch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It finds no record then; it waits for its link, and loads the state of the others."""
    swarm, trainers, end_s = Swarm(seed=1), ("a", "b"), 60.0
    newcomers_id = swarm.world.identity(NEWCOMER).peer_id
    monkeypatch.setattr(Presence, "knew_others", property(lambda presence: presence.peer_id == newcomers_id))
    swarm.start_coordinator()
    network = swarm.world.network
    others = [*trainers, "coordinator"]

    def cut() -> torch.nn.Module:
        for other in others:
            network.block(NEWCOMER, other)
            network.block(other, NEWCOMER)
        swarm.world.loop.call_outside(swarm.world.loop.time() + 20.0, mend)
        return new_model()

    def mend() -> None:
        for other in others:
            network.unblock(NEWCOMER, other)
            network.unblock(other, NEWCOMER)

    def train(member: Member) -> None:
        if member.name == NEWCOMER:
            assert member.peer.presence.knew_others
        step = 0
        while swarm.world.loop.time() < end_s:
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            member.step(member.model(inputs).square().mean(), 0.5)
            step += 1
        member.wait_for(max(one.optimizer.global_step for one in swarm.members.values()))

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    for name in trainers:
        swarm.start(name, new_model, sgd, train, target_batch_size=16, batch_size_per_step=4)
    swarm.start(NEWCOMER, cut, sgd, train, begins_s=20.0, target_batch_size=16, batch_size_per_step=4)
    swarm.run()
    counts = swarm.members[NEWCOMER].optimizer.statistics
    assert counts.steps_alone == 0
    assert counts.states_loaded == 1
    assert counts.rounds_committed > 5
