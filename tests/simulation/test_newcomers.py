"""A newcomer on a slow line takes part, although the run goes on while it downloads the state; in virtual time."""

from __future__ import annotations

import logging

import pytest

from manyhands.optim.step.replica import Replica
from tests.simulation.newcomers import NEWCOMER, joined

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)


@pytest.mark.parametrize("codec", ["int8", pytest.param("fp16", marks=pytest.mark.long)])
def test_a_newcomer_contributes_in_the_first_step_after_its_download_though_five_were_made_meanwhile(
    codec: str,
) -> None:
    run = joined(codec, 5.0)
    newcomer = run.swarm.members[NEWCOMER].optimizer
    peer_id = run.swarm.world.identity(NEWCOMER).peer_id
    assert run.joined_at.step >= 2 + 5
    assert run.compared_at == run.joined_at
    assert newcomer.statistics.states_loaded == 1
    first = min(step for step, contributors in run.contributors.items() if peer_id in contributors)
    assert first <= run.joined_at.step + 2, "the step that had begun when it joined, or the one that began then"
    assert all(len(digests) == 1 for digests in run.digests.values())


@pytest.mark.long
def test_without_kept_steps_it_loads_the_state_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what the steps are kept for."""
    monkeypatch.setattr(Replica, "can_replay", False)
    run = joined("int8", 5.0)
    assert run.contributed_at_s is None
    assert run.swarm.members[NEWCOMER].optimizer.statistics.states_loaded >= 3
