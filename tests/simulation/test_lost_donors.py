"""A newcomer whose donors are gone begins no branch from its initial parameters; in virtual time."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.base.errors import RunNotFound
from manyhands.checkpoints.checkpoints import Checkpoints
from manyhands.runtime.exit_delay import is_hurried
from manyhands.testing import at
from tests.simulation.swarm_of_trainers import Member, Swarm

pytestmark = pytest.mark.usefixtures("one_thread")

TRAINER, AGAIN, NEWCOMER = "trainer", "again", "newcomer"
WIDTHS = (1000, 900)
STATE_BITS = 8 * 4 * 3 * WIDTHS[0] * WIDTHS[1]
"""Parameters and two statistics of AdamW, about: more than what is under way on the line when the donor is lost."""
BATCH_S = 1.0
JOINS_S = 12.0
LOST_S = 14.0
"""In the midst of the download, which takes 20 s."""


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Lost:
    """A run of one trainer with a slow uplink, which is gone while a newcomer downloads its state."""

    def __init__(
        self, folder: Path, *, says_goodbye: bool = False, before_it_leaves: Callable[[Member], object] = bool
    ) -> None:
        self.swarm = Swarm(seed=1)
        self.swarm.start_coordinator()
        self.folder = folder
        self._says_goodbye = says_goodbye
        self._before_it_leaves = before_it_leaves
        self.until_s = 150.0
        self.steps: list[int] = []  # at which the newcomer has begun a batch
        self._start(TRAINER, self._keep)
        up_mbit_s = STATE_BITS / 20.0 / 1e6
        self.swarm.world.network.set_bandwidth(TRAINER, up_mbit_s=up_mbit_s, down_mbit_s=10.0)
        if not says_goodbye:
            self.swarm.world.schedule(at(LOST_S).kill(TRAINER))

    def _start(self, name: str, train: Callable[[Member], None], **options: Any) -> None:
        def new_model() -> torch.nn.Module:
            torch.manual_seed(len(name))
            return torch.nn.Linear(*WIDTHS)

        self.swarm.start(name, new_model, adamw, train, target_batch_size=4, batch_size_per_step=4, **options)

    def _keep(self, member: Member) -> None:
        now = self.swarm.world.loop.time
        is_first = now() < LOST_S
        folder = self.folder / (TRAINER if is_first else AGAIN)
        if not is_first:  # the lock of the first one is still held in this process
            shutil.copytree(self.folder / TRAINER, folder)
        with Checkpoints(folder, member.optimizer, member.model, every=2) as checkpoints:
            checkpoints.resume()
            while now() < (LOST_S if is_first and self._says_goodbye else self.until_s):
                _train(member)
                checkpoints.save_if_due()
        if is_first:
            self._before_it_leaves(member)
            member.optimizer.close()
            self.swarm.world.loop.call_soon(self.swarm.world.kill, TRAINER)

    def run(self, **options: Any) -> None:
        """Let the newcomer join and train."""

        def join(member: Member) -> None:
            folder = self.folder / NEWCOMER
            with Checkpoints(folder, member.optimizer, member.model, every=2) as checkpoints:
                checkpoints.resume()
                while self.swarm.world.loop.time() < self.until_s:
                    self.steps.append(member.optimizer.global_step)
                    _train(member)
                    checkpoints.save_if_due()

        self._start(NEWCOMER, join, begins_s=JOINS_S, **options)
        self.swarm.done.add(TRAINER)
        self.swarm.run()

    def saved_by(self, name: str) -> list[int]:
        return sorted(int(path.name.partition("-")[2]) for path in (self.folder / name).glob("**/checkpoint-*"))


def _train(member: Member) -> None:
    number = int(member.peer.time() * 10)
    inputs = torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(number))
    member.step(member.model(inputs).square().mean(), BATCH_S)


@pytest.mark.long
@pytest.mark.parametrize(("says_goodbye", "start_new"), [(False, None), (True, True)], ids=["killed", "left"])
def test_a_newcomer_whose_only_donor_is_gone_waits_and_follows_it_when_it_is_back_with_its_checkpoint(
    says_goodbye: bool, start_new: bool | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It once began the run anew, alone, and the donor followed it and removed what it had saved."""
    lost = Lost(tmp_path, says_goodbye=says_goodbye)
    kept: list[int] = []
    lost.swarm.world.schedule(at(99).call(lambda: kept.extend(lost.saved_by(TRAINER))), at(100).restart(TRAINER))
    with caplog.at_level(logging.INFO, "manyhands"):
        lost.run(start_new=start_new)
    assert kept[-1] >= 6
    assert caplog.text.count("makes global steps alone, from #1 on") == 1, "of the one that began the run"
    assert "no peer with its state can be reached now" in caplog.text
    assert {step for step in lost.steps if step <= kept[-1]} == {0}, "it made no step of its own"
    assert lost.steps[-1] > kept[-1], "and went on from the checkpoint"
    counts = lost.swarm.members[NEWCOMER].optimizer.statistics
    assert counts.states_loaded == 1


@pytest.mark.parametrize("says_goodbye", [False, True], ids=["killed", "left"])
def test_a_newcomer_that_must_not_begin_the_run_ends_with_what_to_do(says_goodbye: bool, tmp_path: Path) -> None:
    lost = Lost(tmp_path, says_goodbye=says_goodbye)
    with pytest.raises(RunNotFound, match="no peer with its state can be reached now") as error:
        lost.run(start_new=False)
    assert "If a peer has a checkpoint of the run, start that one" in str(error.value)
    assert lost.swarm.world.loop.time() < JOINS_S + 80


def test_a_donor_that_is_told_to_leave_waits_for_a_download_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    have_it = []
    lost = Lost(
        tmp_path, says_goodbye=True, before_it_leaves=lambda one: have_it.append(one.optimizer.wait_for_downloads(30.0))
    )
    lost.until_s = 60.0
    with caplog.at_level(logging.INFO, "manyhands"):
        lost.run(start_new=False)
    assert have_it == [True]
    told = "downloads the state from this one: leaving when it has it, in 30 s at the latest"
    assert f"Peer {lost.swarm.world.identity(NEWCOMER).peer_id} {told}" in caplog.text
    assert lost.steps[0] >= 10
    assert lost.steps[-1] > lost.steps[0], "the newcomer goes on alone"


@pytest.mark.parametrize("is_told_again", [False, True])
def test_a_leaving_donor_waits_up_to_its_limit_or_until_it_is_told_again(
    is_told_again: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    have_it, longest_s = [], 600.0 if is_told_again else 5.0
    lost = Lost(
        tmp_path,
        says_goodbye=True,
        before_it_leaves=lambda one: have_it.append(one.optimizer.wait_for_downloads(longest_s)),
    )
    if is_told_again:
        lost.swarm.world.schedule(at(LOST_S + 4.0).call(is_hurried.set))
    try:
        with pytest.raises(RunNotFound):
            lost.run(start_new=False)
    finally:
        is_hurried.clear()
    assert have_it == [False]
    assert f"is still being downloaded by peer {lost.swarm.world.identity(NEWCOMER).peer_id}" in caplog.text


@pytest.mark.long
def test_a_donor_at_the_end_of_its_training_waits_for_a_newcomer_that_has_not_joined_yet(tmp_path: Path) -> None:
    """It publishes nothing before it has the state."""
    lost = Lost(tmp_path, says_goodbye=True, before_it_leaves=lambda one: one.optimizer.wait_for_others(60.0))
    lost.until_s = 60.0
    lost.run(start_new=False)
    assert lost.steps[0] >= 10
