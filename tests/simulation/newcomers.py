"""A run that a newcomer on a slow line joins, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from manyhands.averaging import AveragingConfig
from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId
from manyhands.optim.run.drift import Drift
from manyhands.testing import links, stream
from tests.simulation.swarm_of_trainers import Member, Swarm, together

TRAINERS = ("p0", "p1")
NEWCOMER = "late"
BATCH_SIZE = 4
BATCH_S = 1.0
TARGET = 32
"""Two trainers take 4 s for it."""
WIDTHS = (150, 160)
STATE_BYTES = 4 * 4 * WIDTHS[0] * WIDTHS[1]
"""Parameters and three statistics of AdamW, about."""
STEP_S = 4.2
JOINS_S = 12.0


def new_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(*WIDTHS)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)


@dataclass
class Run:
    """A run that a newcomer joins.

    Attributes:
        contributed_at_s: when the first step with samples of the newcomer was made, from its begin on; None if never.
        joined_at: where the newcomer was when it had joined.
        compared_at: where its parameters are compared with the others' then; None if nowhere.
        contributors: of each step, by the step that it led to.
        digests: of the state after each step, of all peers that were seen there.
    """

    swarm: Swarm
    contributed_at_s: float | None = None
    joined_at: Position = field(default_factory=lambda: Position(0, b""))
    compared_at: Position | None = None
    is_over: bool = False
    contributors: dict[int, list[str]] = field(default_factory=dict)
    digests: dict[int, set[str]] = field(default_factory=dict)

    def train(self, member: Member, until_s: float) -> None:
        generator = torch.Generator().manual_seed(len(member.name))
        while not self.is_over and member.peer.time() < until_s:
            inputs = torch.randn(BATCH_SIZE, WIDTHS[0], generator=generator)
            before = member.optimizer.global_step
            member.step(member.model(inputs).square().mean(), BATCH_S)
            member.check_samples()
            step = member.optimizer.global_step
            if step != before:
                self.digests.setdefault(step, set()).add(member.optimizer.state_digest())
            if step != before and (round_ := member.optimizer.last_round) is not None:
                self.contributors[step] = list(round_.contributors())
            used = member.optimizer.statistics.samples_used if member.name == NEWCOMER else 0
            if used and self.contributed_at_s is None:
                self.contributed_at_s = member.peer.time() - JOINS_S
            self.is_over = self.is_over or used > 2 * BATCH_SIZE


@mock.patch.object(links, "TURN_BYTES", 1400)  # so that calls get through beside the state on the slow line
@mock.patch.object(stream, "TURN_BYTES", 1400)
def joined(codec: str, num_steps: float, until_s: float = 110.0, **options: Any) -> Run:
    """Two peers train; one more joins, whose line takes so many steps for the state."""
    run = Run(swarm := Swarm(seed=3))
    averaging = AveragingConfig(codec=codec, matchmaking_time_s=4.0, averaging_timeout_s=30.0)
    options = {"target_batch_size": TARGET, "batch_size_per_step": BATCH_SIZE, "averaging": averaging, **options}

    def train(member: Member) -> None:
        together(len(TRAINERS), member)
        run.train(member, until_s)

    compared_at: dict[PeerId, Position] = {}
    moved, loaded = Drift.moved, Drift.loaded

    def note_moved(drift: Drift, position: Position, *arguments: Any, **options: Any) -> None:
        compared_at[drift.own_id] = position
        moved(drift, position, *arguments, **options)

    def note_loaded(drift: Drift) -> None:
        compared_at.pop(drift.own_id, None)
        loaded(drift)

    def join(member: Member) -> None:
        run.joined_at = member.optimizer.replica.position
        run.compared_at = compared_at.get(member.peer.peer_id)
        run.train(member, until_s)

    for name in TRAINERS:
        swarm.start(name, new_model, adamw, train, **options)
    swarm.start(NEWCOMER, new_model, adamw, join, begins_s=JOINS_S, **options)
    mbit_s = 8e-6 * STATE_BYTES / (num_steps * STEP_S)
    swarm.world.network.set_bandwidth(NEWCOMER, up_mbit_s=10.0, down_mbit_s=mbit_s)
    with mock.patch.object(Drift, "moved", note_moved), mock.patch.object(Drift, "loaded", note_loaded):
        swarm.run(until_s + 200.0)
    return run
