"""A loop of one's own goes on from its checkpoints, with the bits that it would have had."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model

import manyhands
from manyhands.base.errors import ConfigError
from manyhands.checkpoints.checkpoints import Checkpoints
from manyhands.optim.lamb import Lamb
from manyhands.optim.local_steps import LocalSteps, nesterov
from tests.simulation.swarm_of_trainers import Member, Swarm, assert_equal_parameters, together
from tests.sweeps import few_of

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Lamb": lambda parameters: Lamb(parameters, lr=0.05),
}


class Model(torch.nn.Module):
    """With tied weights, a buffer, and a frozen part."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.to(dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(self.frozen(torch.tanh(self.norm(self.first(inputs)))))
        return outputs


def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    dtype = next(model.parameters()).dtype
    inputs, targets = (torch.randn(4, 4, generator=generator).to(dtype) for _ in range(2))
    return torch.nn.functional.mse_loss(model(inputs), targets)


def schedule(inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    warmup = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: (step + 1) / 3)
    return torch.optim.lr_scheduler.SequentialLR(inner, [warmup, torch.optim.lr_scheduler.StepLR(inner, 2)], [2])


def alone(
    train: Callable[[Member], None],
    make_model: Callable[[], torch.nn.Module] = Model,
    make: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["AdamW"],
    **options: Any,
) -> Member:
    """Run one peer's program."""
    logging.getLogger("manyhands").setLevel(logging.WARNING)
    swarm = Swarm()
    options = {"target_batch_size": 4, "batch_size_per_step": 4, **options}
    swarm.start("p0", make_model, lambda model: make(model.parameters()), train, **options)
    swarm.run()
    return swarm.members["p0"]


def steps_of(member: Member, numbers: range, checkpoints: Checkpoints | None = None) -> None:
    for number in numbers:
        member.step(loss_of(member.model, number))
        member.optimizer.settle()
        if checkpoints is not None:
            checkpoints.save_if_due()


@pytest.mark.parametrize("optimizer", few_of(OPTIMIZERS, 1, pytest.mark.long))
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"offload": True}),
        (torch.bfloat16, {"offload": True}),
        (torch.bfloat16, {"delay": "optimizer"}),
        (torch.float32, {"delay": "gradients"}),
        (torch.float32, {"local_steps": LocalSteps(nesterov)}),
        (torch.bfloat16, {"local_steps": LocalSteps(nesterov)}),
        (torch.bfloat16, {"local_steps": LocalSteps(nesterov), "offload": True}),
    ],
)
def test_a_loop_goes_on_with_the_same_bits(
    optimizer: str, dtype: torch.dtype, options: dict[str, Any], tmp_path: Path
) -> None:
    places = []

    def first(member: Member) -> None:
        with manyhands.Checkpoints(tmp_path / "first", member.optimizer, member.model, every=3) as checkpoints:
            assert not checkpoints.resume()
            steps_of(member, range(3), checkpoints)
            shutil.copytree(tmp_path / "first", tmp_path / "second")
            steps_of(member, range(3, 5), checkpoints)
        places.append(member.optimizer.state_dict()["manyhands"])
        assert sorted(path.name for path in (tmp_path / "first").glob("ch*")) == ["checkpoint-3", "checkpoint-5"]

    def second(member: Member) -> None:
        with manyhands.Checkpoints(tmp_path / "second", member.optimizer, member.model, every=3) as checkpoints:
            assert checkpoints.resume()
            assert member.optimizer.global_step == 3
            steps_of(member, range(3, 5), checkpoints)
        places.append(member.optimizer.state_dict()["manyhands"])

    settings = {"make": OPTIMIZERS[optimizer], "scheduler": schedule, **options}
    one = alone(first, lambda: Model(dtype), **settings)
    two = alone(second, lambda: Model(dtype), **settings)
    assert_equal_parameters(one.model, two.model, tolerance=0.0)
    assert two.optimizer.state_digest() == one.optimizer.state_digest()
    for name in ("step", "lineage", "lineage_samples", "scheduler"):
        assert places[0][name] == places[1][name], name
    for name, buffer in one.model.named_buffers():
        assert torch.equal(buffer, dict(two.model.named_buffers())[name]), name


@pytest.mark.parametrize("optimizer", few_of(OPTIMIZERS, 1, pytest.mark.long))
@pytest.mark.parametrize(
    ("dtype", "offload"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_local_steps_go_on_from_the_agreed_parameters_where_a_checkpoint_was_saved_between_two_averages(
    optimizer: str, dtype: torch.dtype, offload: bool, tmp_path: Path
) -> None:
    digests = []

    def first(member: Member) -> None:
        with Checkpoints(tmp_path, member.optimizer, member.model, every=1) as checkpoints:
            steps_of(member, range(3))
            assert (member.optimizer.global_step, member.optimizer.samples_accumulated) == (1, 4)
            digests.append(member.optimizer.state_digest())
            checkpoints.save_if_due()

    def second(member: Member) -> None:
        with Checkpoints(tmp_path, member.optimizer, member.model, every=1) as checkpoints:
            assert checkpoints.resume()
            assert (member.optimizer.global_step, member.optimizer.samples_accumulated) == (1, 0)
            digests.append(member.optimizer.state_digest())
            steps_of(member, range(3, 5))
            assert member.optimizer.global_step == 2

    settings = {
        "make": OPTIMIZERS[optimizer],
        "offload": offload,
        "target_batch_size": 8,
        "local_steps": LocalSteps(nesterov),
    }
    for program in (first, second):
        alone(program, lambda: Model(dtype), scheduler=schedule, **settings)
    assert len(set(digests)) == 1, "agreed parameters, outer momentum and schedule"


@pytest.mark.parametrize(
    "local_steps", few_of([None, LocalSteps(nesterov)], 1, pytest.mark.long), ids=["synchronous", "local"]
)
def test_two_peers_that_resume_go_on_as_one_run(local_steps: LocalSteps | None, tmp_path: Path) -> None:
    """The one whose newest checkpoint is torn uses the one before it, and loads the state of the other."""
    logging.getLogger("manyhands").setLevel(logging.ERROR)

    def start(train: Callable[[Member], None]) -> Swarm:
        swarm = Swarm()
        for name in ("p0", "p1"):
            swarm.start(
                name, Model, lambda model: OPTIMIZERS["AdamW"](model.parameters()), train,
                target_batch_size=8, batch_size_per_step=4, begins_s=5.0 if name == "p0" else 0.0,
                local_steps=local_steps,
            )  # fmt: skip
        swarm.run()
        return swarm

    def first(member: Member) -> None:
        checkpoints = Checkpoints(tmp_path / member.name, member.optimizer, member.model, every=1)
        together(2, member)
        for number in range(4):
            member.step(loss_of(member.model, number))
            member.wait_for(number + 1)
            checkpoints.save_if_due()
        checkpoints.close()

    before = start(first)
    torn = tmp_path / "p1" / "checkpoint-4" / "optimizer.safetensors"
    torn.write_bytes(torn.read_bytes()[:100])
    resumed = {}

    def second(member: Member) -> None:
        with Checkpoints(tmp_path / member.name, member.optimizer, member.model) as checkpoints:
            checkpoints.resume()
            resumed[member.name] = member.optimizer.global_step
            member.wait_for(4)
            together(2, member)
            for number in range(4, 6):
                member.step(loss_of(member.model, number))
                member.wait_for(number + 1)

    after = start(second)
    assert resumed == {"p0": 4, "p1": 3}
    assert {member.optimizer.global_step for member in after.members.values()} == {6}
    assert len({member.optimizer.state_digest() for member in after.members.values()}) == 1
    assert before.members["p0"].optimizer.state_digest() != after.members["p0"].optimizer.state_digest()


@pytest.mark.parametrize("has_older", [True, False])
def test_a_state_of_the_others_that_is_newer_than_the_checkpoint_is_saved_at_the_end(
    has_older: bool, tmp_path: Path
) -> None:
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    if has_older:

        def begin(member: Member) -> None:
            with Checkpoints(tmp_path, member.optimizer, member.model) as checkpoints:
                steps_of(member, range(2), checkpoints)

        alone(begin)

    def join(member: Member) -> None:
        steps_of(member, range(3))  # in place of loading the state of others at step 3
        with Checkpoints(tmp_path, member.optimizer, member.model, every=2) as checkpoints:
            assert not checkpoints.resume()
            checkpoints.save_if_due()
            assert not (tmp_path / "checkpoint-3").exists(), "not at once: it may be the first step of many"

    alone(join)
    assert (tmp_path / "checkpoint-3").exists()


@pytest.mark.parametrize("is_anew", [True, False], ids=["begun anew", "same run"])
def test_a_checkpoint_of_another_beginning_of_the_run_is_never_removed(is_anew: bool, tmp_path: Path) -> None:
    """The others began the run anew while this peer was away, and are further: it follows them."""
    logging.getLogger("manyhands").setLevel(logging.ERROR)
    folder = tmp_path / "folder"

    def begin(member: Member) -> None:
        with Checkpoints(folder, member.optimizer, member.model, every=2) as checkpoints:
            checkpoints.resume()
            steps_of(member, range(4), checkpoints)
        if not is_anew:
            shutil.copytree(folder, tmp_path / "other")

    alone(begin)
    before = {path.name: (path / "model.safetensors").read_bytes() for path in folder.glob("checkpoint-*")}
    assert sorted(before) == ["checkpoint-2", "checkpoint-4"]
    swarm = Swarm()

    def others(member: Member) -> None:
        with Checkpoints(tmp_path / "other", member.optimizer, member.model) as checkpoints:
            checkpoints.resume()
            steps_of(member, range(20 - member.optimizer.global_step))
            member.wait_for(26)

    def back(member: Member) -> None:
        assert member.optimizer.global_step >= 8
        with Checkpoints(folder, member.optimizer, member.model, every=2, keep=2) as checkpoints:
            assert not checkpoints.resume()
            while member.optimizer.global_step < 26:
                steps_of(member, range(1), checkpoints)

    for name, train, begins_s in (("p1", others, 0.0), ("p0", back, 6.0)):
        swarm.start(
            name, Model, lambda model: OPTIMIZERS["AdamW"](model.parameters()), train,
            target_batch_size=4, batch_size_per_step=4, begins_s=begins_s,
        )  # fmt: skip
    swarm.run()
    names = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert len(names) == 2
    assert not before.keys() & set(names)
    aside = {path.name: (path / "model.safetensors").read_bytes() for path in folder.glob("other-*/checkpoint-*")}
    assert aside == (before if is_anew else {})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_batch_size": 8}, "target_batch_size is 8 here, 4 in the checkpoint"),
        ({"make": OPTIMIZERS["SGD"]}, "optimizer is 'SGD' here, 'AdamW' in the checkpoint"),
        ({"make_model": lambda: torch.nn.Linear(4, 4)}, "the model has 2 tensors here, 7 in the checkpoint"),
    ],
)
def test_a_checkpoint_of_something_else_is_one_line(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    def first(member: Member) -> None:
        with Checkpoints(tmp_path, member.optimizer, member.model):
            steps_of(member, range(1))

    def second(member: Member) -> None:
        digest = member.optimizer.state_digest()
        checkpoints = Checkpoints(tmp_path, member.optimizer, member.model)
        with pytest.raises(ConfigError, match=says) as error:
            checkpoints.resume()
        checkpoints.close()
        assert "\n" not in str(error.value)
        assert member.optimizer.state_digest() == digest

    alone(first)
    alone(second, **changes)


def test_a_checkpoint_that_cannot_be_used_is_told_from_none(tmp_path: Path) -> None:
    def first(member: Member) -> None:
        with Checkpoints(tmp_path, member.optimizer, member.model):
            steps_of(member, range(1))
        (tmp_path / "checkpoint-1" / "model.safetensors").unlink()
        checkpoints = Checkpoints(tmp_path, member.optimizer, member.model)
        with pytest.raises(ConfigError, match=r"no checkpoint in .* can be read; remove them to begin anew"):
            checkpoints.resume()
        checkpoints.close()

    alone(first)


def test_a_loop_that_forgets_to_resume_is_told_so_before_its_first_batch_is_lost(tmp_path: Path) -> None:
    """It once began anew in silence, and the next start that resumed dropped what it had trained."""

    def first(member: Member) -> None:
        with Checkpoints(tmp_path, member.optimizer, member.model) as checkpoints:
            steps_of(member, range(2), checkpoints)

    def forgetful(member: Member) -> None:
        with Checkpoints(tmp_path, member.optimizer, member.model) as checkpoints:
            says = r"checkpoint-2 is of a later step .* call checkpoints\.resume\(\) once, before the loop"
            with pytest.raises(ConfigError, match=says):
                steps_of(member, range(2), checkpoints)

    alone(first)
    alone(forgetful)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    class WithText(Model):
        def get_extra_state(self) -> str:
            return "text"

    def train(member: Member) -> None:
        with pytest.raises(ConfigError, match="every=0 must be at least 1"):
            Checkpoints(tmp_path, member.optimizer, member.model, every=0)
        no_number: Any = None
        with pytest.raises(ConfigError, match="keep=None must be a whole number"):
            Checkpoints(tmp_path, member.optimizer, member.model, keep=no_number)
        name: Any = "albert-base-v2"
        with pytest.raises(ConfigError, match=r"tokenizer='albert-base-v2' has no save_pretrained\(\)"):
            Checkpoints(tmp_path, member.optimizer, member.model, tokenizer=name)
        values: Any = member.model.state_dict()
        with pytest.raises(ConfigError, match="model is of type OrderedDict"):
            Checkpoints(tmp_path, member.optimizer, values)
        with pytest.raises(ConfigError, match="the model lacks 5 parameters of the optimizer's 7"):
            Checkpoints(tmp_path, member.optimizer, member.model.first)
        with pytest.raises(ConfigError, match=r"_extra_state in the model's state_dict\(\) is a str"):
            Checkpoints(tmp_path, member.optimizer, member.model)
        wrong: Any = torch.optim.SGD(member.model.parameters())
        with pytest.raises(ConfigError, match=r"optimizer is a SGD; it must be a manyhands\.Optimizer"):
            Checkpoints(tmp_path, wrong, member.model)

    alone(train, WithText)
    assert not list(tmp_path.iterdir())


def test_on_a_full_disk_the_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resource = pytest.importorskip("resource")

    def train(member: Member) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        with Checkpoints(tmp_path, member.optimizer, member.model, every=1) as checkpoints:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
            try:
                steps_of(member, range(2), checkpoints)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert not list(tmp_path.glob("*checkpoint*"))
            steps_of(member, range(2, 3), checkpoints)
            assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-3"]

    assert alone(train).optimizer.global_step == 3
    assert [f"The checkpoint of step {step} was not saved" in caplog.text for step in (1, 2, 3)] == [True, True, False]


@pytest.mark.parametrize("is_in_several_files", [False, True])
def test_a_model_of_transformers_goes_on_and_is_one_that_transformers_loads(
    is_in_several_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    kind = transformers.BertForMaskedLM
    if is_in_several_files:
        save = kind.save_pretrained
        monkeypatch.setattr(kind, "save_pretrained", lambda self, to: save(self, to, max_shard_size="2kB"))

    def new_model() -> torch.nn.Module:
        torch.manual_seed(1)
        return kind(config)

    def steps(member: Member, numbers: range) -> None:
        for number in numbers:
            inputs = torch.randint(9, (4, 3), generator=torch.Generator().manual_seed(number))
            member.step(member.model(input_ids=inputs, labels=inputs).loss)

    def first(member: Member) -> None:
        with Checkpoints(tmp_path, member.optimizer, member.model):
            steps(member, range(2))
        steps(member, range(2, 4))

    def second(member: Member) -> None:
        checkpoints = Checkpoints(tmp_path, member.optimizer, member.model)
        assert checkpoints.resume()
        checkpoints.close()
        steps(member, range(2, 4))

    one, two = alone(first, new_model), alone(second, new_model)
    assert two.optimizer.state_digest() == one.optimizer.state_digest()
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists() != is_in_several_files
    loaded = kind.from_pretrained(tmp_path / "checkpoint-2")
    assert loaded.config.hidden_size == 8


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
def test_a_checkpoint_of_a_compiled_module_fits_the_plain_one(tmp_path: Path) -> None:
    def train(member: Member) -> None:
        with Checkpoints(tmp_path, member.optimizer, torch.compile(member.model)):  # type: ignore[arg-type]
            steps_of(member, range(1))

    model = alone(train).model
    load_model(model, tmp_path / "checkpoint-1" / "model.safetensors")
