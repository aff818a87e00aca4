"""However weights get into a wrapped model, training goes on from them."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from manyhands.optim.local_steps import LocalSteps, nesterov
from tests.simulation import small_model
from tests.simulation.small_model import Weights, adam, assert_has, copied, half_model, loss_of, new_model
from tests.simulation.swarm_of_trainers import Member, Swarm, assert_equal_parameters, together

pytestmark = pytest.mark.usefixtures("one_thread")

MODES: dict[str, dict[str, Any]] = {
    "here": {},
    "offload": {"offload": True},
    "delayed gradients": {"delay": "gradients"},
    "local": {"local_steps": LocalSteps(nesterov)},
    "local, in parts": {"local_steps": LocalSteps(nesterov, fragments=2)},
    "local, overlap": {"local_steps": LocalSteps(nesterov, overlap_steps=1)},
    "local, offload": {"local_steps": LocalSteps(nesterov), "offload": True},
}
FEW = ("here", "delayed gradients", "local, offload")
"""The modes in ``make test``."""
in_each_mode = pytest.mark.parametrize(
    "options",
    [pytest.param(options, id=mode, marks=[pytest.mark.long] * (mode not in FEW)) for mode, options in MODES.items()],
)
MODELS = {"float32": new_model, "bfloat16": half_model}
in_each_mode_and_precision = pytest.mark.parametrize(
    ("options", "make"),
    [
        pytest.param(
            options,
            make,
            id=f"{dtype}-{mode}",
            marks=[pytest.mark.sweep] * (dtype == "bfloat16") + [pytest.mark.long] * (mode not in FEW),
        )
        for dtype, make in MODELS.items()
        for mode, options in MODES.items()
        if (mode, dtype) != ("here", "bfloat16")  # AdamW in half precision
    ],
)
alone = functools.partial(small_model.alone, target_batch_size=8)


def prepare(member: Member) -> None:
    """As ``accelerator.prepare`` does it."""
    member.optimizer.load_state_dict(member.optimizer.state_dict())


def other_weights(model: torch.nn.Module) -> Weights:
    return {name: value * 2 + 1 for name, value in model.state_dict().items()}


def agreed_by(member: Member) -> tuple[Weights, str]:
    with member.optimizer.agreed_parameters():
        return copied(member.model), member.optimizer.state_digest()


@in_each_mode
@pytest.mark.parametrize("order", ["load", "load prepare", "prepare load"])
@pytest.mark.parametrize("num_before", [0, 3], ids=["at the beginning", "in the middle of a step"])
def test_weights_loaded_into_the_model_are_those_that_are_trained(
    options: dict[str, Any], order: str, num_before: int
) -> None:
    def train(member: Member) -> None:
        for number in range(num_before):
            member.step(loss_of(member.model, number))
        if order != "load prepare":  # which waits for a step in the background itself
            member.optimizer.settle()
        weights = other_weights(member.model)
        for action in order.split():
            if action == "load":
                member.model.load_state_dict(weights)
            else:
                prepare(member)
                member.check_samples()
                assert not member.optimizer.statistics.samples_dropped
        assert_has(member.model, weights)
        for number in range(4):
            member.step(loss_of(member.model, number))
        member.optimizer.settle()
        is_change_of_its_own = "local_steps" in options and num_before  # the outer optimizer steps with it
        assert_has(member.model, weights, 4.0 if is_change_of_its_own else 0.1)
        assert any(not torch.equal(value, weights[name]) for name, value in member.model.state_dict().items())

    alone(train, **options)


@in_each_mode_and_precision
def test_loading_its_own_state_changes_neither_parameters_nor_waiting_samples(
    options: dict[str, Any], make: Callable[[], torch.nn.Module]
) -> None:
    """Neither parameters nor what waits for the next step."""

    def train(member: Member, *, prepares: bool) -> None:
        for number in range(6):
            if number in (0, 2, 3) and prepares:
                prepare(member)
            member.step(loss_of(member.model, number))
            if "delay" in options:
                member.optimizer.settle()
        assert not member.optimizer.statistics.samples_dropped
        ends.append((agreed_by(member), copied(member.model)))

    ends: list[tuple[tuple[Weights, str], Weights]] = []
    for prepares in (False, True):
        alone(lambda member, prepares=prepares: train(member, prepares=prepares), make, **options)
    ((_, digest), own), ((_, other_digest), other_own) = ends
    assert digest == other_digest
    assert_has(own, other_own)


RESUMES = [
    ("load resume", 3),
    ("load prepare resume", 0),
    ("load prepare resume", 3),
    ("prepare load resume", 3),
    ("prepare resume load", 0),
]


@in_each_mode_and_precision
def test_a_checkpoint_resumes_in_any_order(options: dict[str, Any], make: Callable[[], torch.nn.Module]) -> None:
    """In a new process, and in one that has trained already; as a new one that loads the model, and then the state."""
    saved: dict[str, Any] = {}

    def first(member: Member) -> None:
        for number in range(4):
            member.step(loss_of(member.model, number))
        member.optimizer.settle()
        with member.optimizer.agreed_parameters():
            saved["optimizer"] = copy.deepcopy(member.optimizer.state_dict())  # as writing it to a file would
            saved["model"] = copied(member.model)

    def resumed(member: Member, order: str, num_before: int) -> None:
        for number in range(num_before):
            member.step(loss_of(member.model, 100 + number))
        for action in order.split():
            if action == "load":
                member.model.load_state_dict(saved["model"])
            elif action == "resume":
                member.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            else:
                prepare(member)
        assert_has(agreed_by(member)[0], saved["model"])
        for number in range(4, 8):
            member.step(loss_of(member.model, number))
            member.optimizer.settle()
        ends[order, num_before] = agreed_by(member)

    ends: dict[tuple[str, int], tuple[Weights, str]] = {}
    alone(first, make, **options)
    for order, num_before in [("load resume", 0), *RESUMES]:
        if make is half_model and order.endswith("load"):
            continue  # a model that is loaded last has no more precision than it has
        alone(lambda member, order=order, number=num_before: resumed(member, order, number), make, **options)
        assert_has(ends[order, num_before][0], ends["load resume", 0][0])
        assert ends[order, num_before][1] == ends["load resume", 0][1], order


@pytest.mark.parametrize(
    ("options", "make"),
    [(MODES["here"], new_model), (MODES["offload"], new_model), (MODES["offload"], half_model)],
    ids=["here", "offload", "offload, bfloat16"],
)
def test_training_goes_on_from_weights_that_the_loop_has_clipped(
    options: dict[str, Any], make: Callable[[], torch.nn.Module]
) -> None:
    """Weights that are clipped after each step; those that the bounds leave alone keep their precision."""

    def clip(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)

    def train(member: Member) -> None:
        for number in range(20):
            member.step(loss_of(member.model, number))
            clip(member.model)

    member = alone(train, make, target_batch_size=4, **options)
    expected = new_model()
    plain = adam(expected)
    for number in range(20):
        loss_of(expected, number).backward()
        plain.step()
        plain.zero_grad()
        clip(expected)
    is_half = make is half_model
    assert_equal_parameters(member.model.float(), expected, tolerance=0.02 if is_half else 1e-5)


@pytest.mark.parametrize("delay", ["optimizer", "gradients"])
def test_a_step_in_the_background_says_that_it_overwrites_what_a_loop_does(
    delay: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train(member: Member) -> None:
        logging.getLogger("manyhands").setLevel(logging.WARNING)
        for number in range(8):
            member.step(loss_of(member.model, number))
            if does_clip:
                with torch.no_grad():
                    next(member.model.parameters()).clamp_(-0.3, 0.3)

    for does_clip in (False, True):
        caplog.clear()
        alone(train, delay=delay, target_batch_size=4)
        texts = [text for text in caplog.messages if "while a step was made in the background" in text]
        assert len(texts) == does_clip
        assert all("load weights only after optimizer.settle()" in text for text in texts)


def test_with_offload_weights_that_one_peer_loads_into_a_run_are_corrected_as_without() -> None:
    """Two others hold the majority."""
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    swarm, digests = Swarm(), {}

    def train(member: Member) -> None:
        together(3, member)
        for number in range(4):
            if number == 1 and member.name == "p0":
                member.model.load_state_dict(other_weights(member.model))
            while member.optimizer.global_step <= number:  # once more if its samples are dropped as it is corrected
                member.step(loss_of(member.model, 10 * number + int(member.name[1])))
        member.wait_for(4)
        digests[member.name] = member.optimizer.state_digest()

    for name in ("p0", "p1", "p2"):
        swarm.start(name, new_model, adam, train, target_batch_size=12, batch_size_per_step=4, offload=True)
    swarm.run()
    assert len(set(digests.values())) == 1
    assert swarm.members["p0"].optimizer.statistics.parameters_reloaded == 1
