"""What a round leaves behind that fails: nothing that the collector would have to come for."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest

from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.round.exchange import Contribution, Exchange
from manyhands.optim.step.global_step import GlobalStep
from tests.simulation.swarm_of_trainers import Member, Swarm, together
from tests.simulation.test_delay import quadratic, sgd
from tests.simulation.test_drop_in import new_model

CUT_S = 20.0
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("delay", [None, "gradients"], ids=["synchronous", "delayed"])
def test_a_failed_round_keeps_no_vector_until_the_collector_comes(
    delay: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these holds vectors as large as the model; only a butterfly may wait for the collector."""
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    swarm = Swarm(seed=31)
    made: list[weakref.ref[Any]] = []
    cuts: list[float] = []
    ended: list[str] = []

    def noted(owner: type) -> None:
        original: Any = owner.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            made.append(weakref.ref(self))

        monkeypatch.setattr(owner, "__init__", init)

    for owner in (Butterfly, Contribution, Exchange, GlobalStep):
        noted(owner)
    run: Any = Exchange.run
    network = swarm.world.network

    def heal() -> None:
        network.unblock("p0", "p1")
        network.unblock("p1", "p0")

    async def cut_off(self: Any) -> Any:
        """The network is cut as the values of a step go out."""
        step = swarm.members["p0"].optimizer.global_step
        if step == 3 and not cuts:
            cuts.append(swarm.world.loop.time())
            network.block("p0", "p1")
            network.block("p1", "p0")
            swarm.world.loop.call_outside(swarm.world.loop.time() + CUT_S, heal)
        return await run(self)

    monkeypatch.setattr(Exchange, "run", cut_off)

    def train(member: Member) -> None:
        together(2, member)
        while member.optimizer.global_step < 6:
            member.step(quadratic(member.model))
            member.check_samples()
        member.optimizer.settle()
        assert member.optimizer.statistics.rounds_aborted >= 1
        ended.append(member.name)
        if len(ended) == 2:
            alive = [type(one()) for one in made if one() is not None]
            assert set(alive) <= {Butterfly}
            gc.collect()
            assert not [one for one in made if one() is not None]

    for name in ("p0", "p1"):
        swarm.start(name, new_model, sgd, train, target_batch_size=36, batch_size_per_step=4, delay=delay)

    gc.collect()
    gc.disable()
    try:
        swarm.run()
    finally:
        gc.enable()
    assert cuts
