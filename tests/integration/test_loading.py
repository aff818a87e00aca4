"""An evaluator loads the model of a run, and nobody in the run notices."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import manyhands
from manyhands.averaging.state import content as state_module
from manyhands.base.errors import ConfigError, ManifestMismatch, Unavailable
from tests.trainers import Trainer, in_threads, new_model, peers


def named_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=0.01)


def assert_equal(model: torch.nn.Module, trained: torch.nn.Module) -> None:
    for one, other in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("make", [None, named_adamw], ids=["without names", "named"])
def test_an_evaluator_gets_the_parameters_and_is_not_waited_for(make: None) -> None:
    with peers(3) as (one, two, onlooker):
        trainers = [Trainer(peer, "evaluated", 16, make=make) for peer in (one, two)]
        in_threads([lambda t=trainer: t.train_until(2) for trainer in trainers])  # type: ignore[misc]
        model = new_model(7)
        loaded = manyhands.load_state_from_peers(onlooker, "evaluated", into=model)
        assert_equal(model, trainers[0].model)
        assert loaded.global_step == 2
        assert loaded.samples == trainers[0].optimizer.replica.lineage_samples
        assert set(loaded.donors) <= {one.peer_id, two.peer_id}
        assert loaded.num_bytes > 0
        assert loaded.seconds > 0
        in_threads([lambda t=trainer: t.train_until(4) for trainer in trainers])  # type: ignore[misc]
        assert all(trainer.optimizer.num_peers == 2 for trainer in trainers)
        assert all(trainer.optimizer.statistics.rounds_aborted == 0 for trainer in trainers)
        assert manyhands.load_state_from_peers(onlooker, "evaluated", into=model).global_step == 4
        assert_equal(model, trainers[1].model)


def test_chunks_that_the_model_already_holds_are_not_downloaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "CHUNK_BYTES", 256)
    with peers(2) as (one, onlooker):
        trainer = Trainer(one, "held", 8)
        trainer.train_until(1)
        model = new_model(7)
        first = manyhands.load_state_from_peers(onlooker, "held", into=model)
        again = manyhands.load_state_from_peers(onlooker, "held", into=model)
        assert_equal(model, trainer.model)
        assert again.num_bytes <= 256 < first.num_bytes, "the last chunk has statistics, too"


def test_a_model_on_another_precision_is_filled_as_well() -> None:
    with peers(2) as (one, onlooker):
        trainer = Trainer(one, "half", 8)
        trainer.train_until(1)
        model = new_model(7).to(torch.bfloat16)
        manyhands.load_state_from_peers(onlooker, "half", into=model)
        assert_equal(model, trainer.model.to(torch.bfloat16))


def test_a_model_that_differs_is_refused_with_the_names() -> None:
    with peers(2) as (one, onlooker):
        trainer = Trainer(one, "differs", 8, make=named_adamw)
        with pytest.raises(ManifestMismatch, match=r"tensor 0.weight has shape \[9, 5\] here, \[8, 5\] in the run"):
            manyhands.load_state_from_peers(onlooker, "differs", into=new_model(width=9))
        with pytest.raises(ManifestMismatch, match=r"the model has no tensor 2\.weight"):
            manyhands.load_state_from_peers(onlooker, "differs", into=new_model()[:1])  # type: ignore[index]
        larger = torch.nn.Sequential(*new_model(), torch.nn.Linear(3, 3))  # type: ignore[arg-type]
        with pytest.raises(ManifestMismatch, match=r"the run does not train tensor 3\.weight"):
            manyhands.load_state_from_peers(onlooker, "differs", into=larger)
        trainer.optimizer.close()


def test_a_run_that_nobody_trains_is_unavailable_within_seconds() -> None:
    with peers(2) as (_, onlooker):
        model = new_model()
        begun = time.monotonic()
        with pytest.raises(Unavailable, match="nobody trains run 'nothing'"):
            manyhands.load_state_from_peers(onlooker, "nothing", into=model)
        assert time.monotonic() - begun < 30


def test_values_that_are_not_finite_do_not_reach_the_model() -> None:
    with peers(2) as (one, onlooker):
        trainer = Trainer(one, "nan", 8)
        with torch.no_grad():
            next(trainer.model.parameters()).view(-1)[3] = float("nan")
        model = new_model(7)
        with pytest.raises(Unavailable, match="values that are not finite"):
            manyhands.load_state_from_peers(onlooker, "nan", into=model)
        assert_equal(model, new_model(7))


def test_wrong_arguments_are_named() -> None:
    model = new_model()
    with peers(1) as (peer,):
        for named, says in (
            ({"peer": None}, r"it must be this machine's manyhands\.Peer"),
            ({"run_id": 4}, "run_id is of type int"),
            ({"into": model.state_dict()}, "into is of type OrderedDict; give the model"),
        ):
            arguments: dict[str, Any] = {"peer": peer, "run_id": "run", "into": model} | named
            with pytest.raises(ConfigError, match=says):
                manyhands.load_state_from_peers(**arguments)
