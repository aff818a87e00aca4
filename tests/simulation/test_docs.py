"""The programs on pages of the docs run, and do what the pages say."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch

from manyhands.optim.local_steps import LocalSteps
from manyhands.peer import Presence
from manyhands.testing import Host, World
from manyhands.testing.blocking import SimPeer, run_blocking
from tests.inside import OpenOptimizer

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reference" / "testing.md"
LOCAL_STEPS = DOCS / "how-to" / "local-steps.md"


def test_the_program_on_the_page_runs() -> None:
    match = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert match is not None
    namespace: dict[str, object] = {}
    exec(compile(match.group(1), str(PAGE), "exec"), namespace)
    assert namespace["seen"] == {name: ["a", "b", "c"] for name in "abc"}


def muon_of(model: torch.nn.Sequential) -> torch.optim.Optimizer:
    """The optimizer on the page of local steps."""
    match = re.search(r"```python\n(class MuonAndAdamW.*?)```", LOCAL_STEPS.read_text(), re.DOTALL)
    assert match is not None
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(match.group(1), str(LOCAL_STEPS), "exec"), namespace)
    made: torch.optim.Optimizer = namespace["MuonAndAdamW"](
        [model[0].weight], [model[0].bias, *model[1].parameters()], 0.01
    )
    return made


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 1))


def computes(model: torch.nn.Sequential, number: int) -> None:
    model.zero_grad()
    model(torch.ones(4, 6) * (number % 3)).square().mean().backward()


def test_muon_and_adamw_as_one_optimizer_go_on_from_their_checkpoint() -> None:
    model, resumed = small_model(), small_model()
    optimizer, again = muon_of(model), muon_of(resumed)
    for number in range(6):
        if number == 5:
            resumed.load_state_dict(model.state_dict())
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            computes(resumed, number)
            again.step()
        computes(model, number)
        optimizer.step()
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_muon_and_adamw_as_one_optimizer_make_local_steps() -> None:
    def train(peer: SimPeer) -> None:
        model = small_model()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = OpenOptimizer(
            muon_of(model),
            peer=peer,
            run_id="muon",
            target_batch_size=8,
            batch_size_per_step=4,
            local_steps=LocalSteps(),
        )
        for number in range(6):
            computes(model, number)
            optimizer.step()
        assert optimizer.global_step == 3
        assert not any(map(torch.equal, before, model.parameters()))

    async def program(host: Host) -> None:
        presence = Presence(world.transport(host), rng=world.rng("muon"), wall_clock=host.wall_clock)
        try:
            await presence.start([], [])
            await run_blocking(lambda: train(SimPeer(presence)))
        finally:
            await presence.stop()

    world = World(0)
    world.start("muon", program)
    world.run(60.0)
