"""Ctrl-C at any line of ``step()``: parameters, schedule and position are those of one and the same step."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import manyhands
from manyhands.runtime import interrupts
from tests.inside import OpenOptimizer
from tests.trainers import FAST, LISTEN

PLACES = (str(Path(manyhands.__file__).parent / "optim"), interrupts.__file__, __file__)
MAX_LINES = 2000
MORE_OPTIONS: list[dict[str, Any]] = [{}, {"delay": "optimizer"}, {"delay": "gradients"}]


class Interrupter:
    """Has Ctrl-C come at the n-th line of the training thread in the optimizer, or in the user's code within it."""

    def __init__(self) -> None:
        self._left = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(PLACES):
            return None
        if event == "line" and self._left > 0:
            self._left -= 1
            if self._left == 0:
                self.where = f"{Path(path).name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self

    def after(self, num_lines: int, what: Any) -> bool:
        """Call something that is interrupted after some lines; returns whether it was."""
        self._left, self.where = num_lines, ""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            what()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        assert not self.where, f"what came at {self.where} was never heard of"
        return False


@pytest.fixture
def peer() -> Iterator[manyhands.Peer]:
    with manyhands.Peer(listen=LISTEN) as peer:
        yield peer


class User:
    """A loop in which a parameter counts the steps that were made with it, and so does the momentum."""

    def __init__(self, peer: manyhands.Peer, options: dict[str, Any]) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
        self.optimizer = OpenOptimizer(
            torch.optim.SGD(self.parameters, lr=1.0),
            peer=peer, run_id="interrupts", target_batch_size=1, batch_size_per_step=1, **options,
            scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, self.factor), progress=FAST,
        )  # fmt: skip

    def factor(self, step: int) -> float:
        return 1.0

    def batch(self) -> None:
        for parameter in self.parameters:
            parameter.grad = -torch.ones_like(parameter)
        self.optimizer.step()

    def check(self, where: str) -> None:
        self.optimizer.settle()
        replica, counts = self.optimizer.replica, self.optimizer.statistics
        step = replica.position.step
        assert set(replica.flat_parameters().tolist()) == {float(step)}, (where, step)
        assert replica.scheduler is not None
        assert replica.scheduler.last_epoch == step, where
        assert replica.lineage_samples == counts.samples_used, (where, counts)
        assert counts.samples_used <= counts.samples_computed, (where, counts)
        assert not self.optimizer.is_stepping, where
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, where


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # it was made, and then came the interrupt
@pytest.mark.parametrize(
    ("options", "every"),
    [
        ({"offload": True}, 9),
        pytest.param({"offload": True}, 1, marks=pytest.mark.long),
        *(pytest.param(options, 1, marks=pytest.mark.sweep) for options in MORE_OPTIONS),
    ],
    ids=str,
)
def test_an_interrupt_at_any_line_of_a_step_breaks_nothing(
    peer: manyhands.Peer, options: dict[str, Any], every: int
) -> None:
    user, interrupt = User(peer, options), Interrupter()
    for _ in range(3):
        user.batch()
    for number in range(1, MAX_LINES, every):
        was_interrupted = interrupt.after(number, user.batch)
        user.check(interrupt.where)
        if not was_interrupted:
            break
        step = user.optimizer.replica.position.step
        user.batch()
        user.check(f"after {interrupt.where}")
        assert user.optimizer.global_step > step, f"after {interrupt.where}"
        for parameter in user.parameters:
            assert parameter.tolist() == [float(user.optimizer.global_step)] * parameter.numel()
    assert 100 < number < MAX_LINES
