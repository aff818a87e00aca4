"""``transformers.Trainer`` in a run: its steps are those of one process with the batches of all peers."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import manyhands
from manyhands.base.errors import ConfigError, ManifestMismatch
from manyhands.optim.metrics import MetricsRecord, read_metrics
from manyhands.training.transformers import CollaborativeCallback
from tests.accelerators import forget_accelerator
from tests.schedule_free import ScheduleFreeAdamW
from tests.sweeps import few_of
from tests.trainers import AVERAGING, FAST, in_threads, peers

TARGET = 24
OPTIONS: dict[str, Any] = {
    "run_id": "trainers", "target_batch_size": TARGET, "averaging": AVERAGING, "progress": FAST
}  # fmt: skip
IGNORED = -100


@pytest.fixture(autouse=True)
def libraries_are_as_before() -> Iterator[None]:
    """accelerate keeps its state for the whole process; small tensors on a busy machine need one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    forget_accelerator()


class Tagger(torch.nn.Module):
    """Labels each of four tokens, or not; its loss is a mean over the labels that count.

    It takes any keyword, but does not divide by ``num_items_in_batch``, as many models in transformers do not.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 100))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        logits = self.inner(inputs)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Recorder(transformers.TrainerCallback):
    """Which samples a Trainer gave to each global step, and at which rate it was made."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self.batches: dict[int, list[dict[str, torch.Tensor]]] = {}
        self._waiting: list[dict[str, torch.Tensor]] = []
        self._train_batch = trainer.training_step
        trainer.training_step = self._record

    def _record(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any) -> torch.Tensor:
        self._waiting.append({name: value.clone() for name, value in inputs.items()})
        return self._train_batch(model, inputs, *args)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > max(self.batches, default=0) and self._waiting:
            self.batches[state.global_step], self._waiting = self._waiting, []


def dataset(num_samples: int, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(num_samples):
        labels = torch.randint(100, (4,), generator=generator)
        labels[: index % 4] = IGNORED
        samples.append({"inputs": torch.randn(4, 3, generator=generator), "labels": labels})
    return samples


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    defaults: dict[str, Any] = {
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_steps": 4,
        "logging_steps": 1, "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "linear", "warmup_steps": 2,
        "weight_decay": 0.1, "max_grad_norm": 0.2, "per_device_train_batch_size": 2, "log_level": "error",
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **defaults | options)


def made(folder: Path, *, seed: int = 1, num_samples: int = 31, **options: Any) -> transformers.Trainer:
    return transformers.Trainer(Tagger(), arguments(folder, **options), train_dataset=dataset(num_samples, seed))


def collaborating(trainer: transformers.Trainer, peer: manyhands.Peer, **options: Any) -> CollaborativeCallback:
    callback = CollaborativeCallback(trainer, peer=peer, **OPTIONS | options)
    trainer.add_callback(callback)
    return callback


def losses_of(trainer: transformers.Trainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def train_together(*trainers: transformers.Trainer) -> None:
    """Each begins when all are there."""
    start = threading.Barrier(len(trainers))

    def train(trainer: transformers.Trainer) -> None:
        optimizer = trainer.optimizer
        while optimizer.num_peers < len(trainers):
            optimizer.step(batch_size=0)
            optimizer.peer.sleep(0.02)
        start.wait(120)
        trainer.train()

    in_threads([lambda trainer=trainer: train(trainer) for trainer in trainers])


def plain_steps(
    batches: list[list[dict[str, torch.Tensor]]],
    args: transformers.TrainingArguments,
    autocast: torch.autocast | None = None,
) -> Tagger:
    """What plain torch makes of the same samples, each step with one batch."""
    model = Tagger()
    plain = transformers.Trainer(model, args)  # for its optimizer and its schedule
    plain.create_optimizer_and_scheduler(args.max_steps)
    for step in batches:
        whole = {name: torch.cat([batch[name] for batch in step]) for name in ("inputs", "labels")}
        with autocast or contextlib.nullcontext():
            loss = model(**whole)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        plain.optimizer.step()
        plain.lr_scheduler.step()
        plain.optimizer.zero_grad()
    return model


def test_two_trainers_make_the_steps_of_one_process_with_the_whole_batch(tmp_path: Path) -> None:
    """Unequal batches, unequal accumulation, short last batches, unequally many labels, and one scales its losses."""
    with peers(2) as (one, other):
        trainers = [
            made(tmp_path / "1", per_device_train_batch_size=2, gradient_accumulation_steps=3),
            made(tmp_path / "2", seed=2, per_device_train_batch_size=5),
        ]
        trainers[1].accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # as with fp16 on a GPU
        callbacks = [collaborating(trainer, peer) for trainer, peer in zip(trainers, (one, other), strict=True)]
        recorders = [Recorder(trainer) for trainer in trainers]
        for trainer, recorder in zip(trainers, recorders, strict=True):
            trainer.add_callback(recorder)
        train_together(*trainers)
        metrics = one.run(read_metrics(one.dht, "trainers", MetricsRecord), 10.0, "reading")
    for callback, trainer in zip(callbacks, trainers, strict=True):
        counts = callback.optimizer.statistics
        assert counts.samples_dropped == counts.samples_carried == 0
        assert callback.optimizer.global_step == trainer.state.global_step == 4, "max_steps are those of the run"
    assert callbacks[0].optimizer.state_digest() == callbacks[1].optimizer.state_digest()
    steps = [[*recorders[0].batches[step], *recorders[1].batches[step]] for step in range(1, 5)]
    assert {len(batch["inputs"]) for step in steps for batch in step} >= {1, 2, 5}
    expected = plain_steps(steps, arguments(tmp_path))
    for value, right in zip(trainers[0].model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, right, atol=1e-5, rtol=0)
    rates = [entry["learning_rate"] for entry in trainers[1].state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.0, 0.25, 0.5, 0.25]), "by global step, as the Trainer computes for one process"
    assert [entry["num_peers"] for entry in trainers[1].state.log_history if "loss" in entry] == [2] * 4
    assert {record.step for record in metrics.values()} == {4}, "for the monitors of the run"
    assert {one.peer_id, other.peer_id} == set(metrics)


def test_the_trainer_logs_the_losses_rates_and_epochs_of_global_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With two accumulated batches it has reported twice the loss of a model that takes any keyword."""
    caplog.set_level(logging.INFO, "manyhands")
    with peers(1) as (peer,):
        trainer = made(tmp_path, gradient_accumulation_steps=2, max_steps=3, learning_rate=1e-6, logging_steps=2)
        collaborating(trainer, peer)
        result = trainer.train()
        assert trainer.optimizer.optimizer.statistics.samples_computed == pytest.approx(3 * TARGET, abs=2)
    loss = plain_loss(trainer)
    assert losses_of(trainer) == pytest.approx({2: loss}, abs=0.2), "4.6, not 9.1, nor the sum of 12 batches"
    assert result.training_loss == pytest.approx(loss, abs=0.2)
    assert result.global_step == 3
    rate = result.metrics["train_samples_per_second"] * result.metrics["train_runtime"]
    assert rate == pytest.approx(3 * TARGET, rel=0.1)
    assert trainer.state.epoch == pytest.approx(3 * TARGET / 31, abs=0.1), "which may be several batches a step"
    lines = [line for line in caplog.messages if not line.startswith("Collaboration accumulated")]  # of another thread
    assert any(line.startswith("gradient_accumulation_steps=2 is set to 1: ") for line in lines)
    assert any(line.startswith("max_grad_norm=0.2 of the Trainer is set to 0: ") for line in lines)
    at = lines.index("Step 3")
    assert lines[at + 1] in ("Your current contribution: 24 samples", "Your current contribution: 25 samples")
    assert lines[at + 2].startswith("Performance: ")
    assert lines[at + 2].endswith(" samples/sec")
    assert lines[at + 3].startswith("Local loss: 4.")


def test_accumulation_is_refused_with_local_steps(tmp_path: Path) -> None:
    with peers(1) as (peer,):
        trainer = made(tmp_path, gradient_accumulation_steps=2)
        with pytest.raises(ConfigError, match="gradient_accumulation_steps=2 does not work with local_steps"):
            CollaborativeCallback(trainer, peer=peer, **OPTIONS, local_steps=manyhands.LocalSteps())


def plain_loss(trainer: transformers.Trainer) -> float:
    with torch.no_grad():
        samples = trainer.train_dataset
        whole = {name: torch.stack([sample[name] for sample in samples]) for name in ("inputs", "labels")}
        loss = float(Tagger()(**whole)["loss"])
    assert loss == pytest.approx(math.log(100), abs=0.3)
    return loss


def test_with_an_optimizer_of_its_own_the_arguments_change_nothing(tmp_path: Path) -> None:
    with peers(1) as (peer,):
        model = Tagger()
        optimizer = manyhands.Optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), peer=peer, **OPTIONS,
            scheduler=lambda inner: torch.optim.lr_scheduler.ExponentialLR(inner, 0.5),
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments(tmp_path), train_dataset=dataset(31, 1), optimizers=(optimizer, None)
        )
        trainer.add_callback(CollaborativeCallback(trainer))
        trainer.train()
        assert optimizer.global_step == 4
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == [0.1, 0.05, 0.025, 0.0125]


@pytest.mark.parametrize(("name", "value"), [("max_steps", 5), ("learning_rate", 0.1), ("warmup_steps", 1)])
def test_peers_with_another_schedule_or_end_are_refused(tmp_path: Path, name: str, value: float) -> None:
    with peers(2) as (one, other):
        first = made(tmp_path)
        collaborating(first, one)
        assert first.args.max_grad_norm == 0
        with pytest.raises(manyhands.ManifestMismatch, match=name):
            collaborating(made(tmp_path, **{name: value}), other)


def test_peers_with_another_frozen_base_are_refused(tmp_path: Path) -> None:
    def with_frozen_base(folder: Path, shift: float) -> transformers.Trainer:
        trainer = made(folder)
        base = trainer.model.inner[0].requires_grad_(requires_grad=False)
        with torch.no_grad():
            base.bias[0] += shift
        return trainer

    with peers(3) as (one, other, third):
        collaborating(with_frozen_base(tmp_path / "one", 0.0), one)
        collaborating(with_frozen_base(tmp_path / "same", 0.0), third)
        with pytest.raises(ManifestMismatch, match="parameters outside the optimizer is 2 tensors of digest"):
            collaborating(with_frozen_base(tmp_path / "other", 1e-3), other)


@pytest.mark.long
def test_a_late_joiner_ends_at_the_step_of_the_others_and_sees_other_batches(tmp_path: Path) -> None:
    with peers(2) as (one, other):
        first, second = made(tmp_path / "1", max_steps=6), made(tmp_path / "2", max_steps=6)
        collaborating(first, one)
        late: list[CollaborativeCallback] = []

        class Join(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 2 and not thread.ident:
                    thread.start()
                    begun.wait(120)

        class Begun(transformers.TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                assert state.global_step == 2
                begun.set()

        def join() -> None:
            late.append(collaborating(second, other))
            second.add_callback(Begun())
            second.train()

        begun, thread = threading.Event(), threading.Thread(target=join)
        first.add_callback(Join())
        in_threads([first.train])
        thread.join(30.0)
        assert begun.is_set()
    assert second.state.global_step == first.state.global_step == late[0].optimizer.global_step == 6
    assert min(losses_of(second)) >= 3
    assert max(losses_of(second).values()) < 6, "the first one is not divided among the steps before"
    loaders = [trainer.get_train_dataloader() for trainer in (first, second)]
    orders = [torch.cat([batch["inputs"] for batch in loader]) for loader in loaders]  # one batch may be alike
    assert not torch.equal(*orders), "with the same seed, too"


@pytest.mark.long
def test_a_checkpoint_is_of_one_global_step_and_goes_on_from_there(tmp_path: Path) -> None:
    with peers(1) as (peer,):
        trainer = made(tmp_path, max_steps=3, save_strategy="steps", save_steps=2, bf16=True)
        callback = collaborating(trainer, peer)
        saves = []
        trainer.add_callback(Saves(saves))
        trainer.train()
        digest = callback.optimizer.state_digest()
    assert saves == [2, 3], "once for each, and at the end"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    with peers(1) as (peer,):
        trainer = made(tmp_path, max_steps=3)
        callback = collaborating(trainer, peer)
        trainer.train(resume_from_checkpoint=True)
        assert callback.optimizer.state_digest() == digest, "the run had all its steps"
    with peers(1) as (peer,):
        trainer = made(tmp_path, max_steps=5)
        callback = collaborating(trainer, peer)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert callback.optimizer.global_step == trainer.state.global_step == 5
    assert sorted(losses_of(trainer)) == [1, 2, 3, 4, 5], "with those of the checkpoint"
    assert max(losses_of(trainer).values()) < 6


@pytest.mark.long
@pytest.mark.parametrize("in_one_process", few_of([False, True]))
@pytest.mark.parametrize(
    "options",
    [
        {"local_steps": manyhands.LocalSteps()},
        {"local_steps": manyhands.LocalSteps(fragments=2, overlap_steps=1)},
        {"local_steps": manyhands.LocalSteps(), "offload": True},
        {"delay": "gradients"},
    ],
    ids=["local", "local, in parts", "local, offload", "delay"],
)
def test_a_resumed_training_goes_on_from_the_saved_model(
    tmp_path: Path, options: dict[str, Any], *, in_one_process: bool
) -> None:
    """It has begun from new weights: the Trainer loads the model before the optimizer's state."""
    often: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 0.02, "lr_scheduler_type": "constant"}
    with peers(1) as (peer,):
        trainer = made(tmp_path, max_steps=20, save_strategy="steps", save_steps=20, **often)
        collaborating(trainer, peer, **options)
        trainer.train()
        if in_one_process:
            trainer.train(resume_from_checkpoint=True)
        trained = training_loss(trainer)
    assert trained < plain_loss(trainer) - 0.5
    with peers(1) as (peer,):
        trainer = made(tmp_path, max_steps=21, **often)
        callback = collaborating(trainer, peer, **options)
        trainer.train(resume_from_checkpoint=True)
        assert callback.optimizer.global_step == trainer.state.global_step == 21
        assert training_loss(trainer) == pytest.approx(trained, abs=0.2)
        with trainer.optimizer.optimizer.agreed_parameters():
            assert training_loss(trainer) == pytest.approx(trained, abs=0.2)


def training_loss(trainer: transformers.Trainer) -> float:
    with torch.no_grad():
        samples = trainer.train_dataset
        whole = {name: torch.stack([sample[name] for sample in samples]) for name in ("inputs", "labels")}
        return float(trainer.model(**whole)["loss"])


@pytest.mark.parametrize(
    "options",
    few_of([{"delay": "gradients"}, {}, {"offload": True}], 1, pytest.mark.long),
    ids=["delay", "here", "offload"],
)
def test_a_schedule_free_optimizer_trains_evaluates_and_resumes(tmp_path: Path, options: dict[str, Any]) -> None:
    """Its evaluations are of the weights to evaluate; these are saved, and it trains others."""

    def made_free(max_steps: int) -> transformers.Trainer:
        model = Tagger()
        return transformers.Trainer(
            model, arguments(tmp_path, max_steps=max_steps, eval_strategy="steps", eval_steps=2, save_steps=4,
                             save_strategy="steps", lr_scheduler_type="constant", eval_on_start=True),
            train_dataset=dataset(31, 1), eval_dataset=dataset(31, 1),
            optimizers=(ScheduleFreeAdamW(model.parameters(), lr=0.02), None),
        )  # fmt: skip

    with peers(1) as (peer,):
        trainer = made_free(8)
        collaborating(trainer, peer, **options)
        trainer.train()
        optimizer: Any = trainer.optimizer.optimizer
        assert optimizer.param_groups[0]["train_mode"] is False, "it has evaluated"
        evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert evaluated[-1] < evaluated[0] - 0.2
        optimizer.train()
        trained = training_loss(trainer)
        optimizer.eval()
        assert training_loss(trainer) != trained
    with peers(1) as (peer,):
        trainer = made_free(8)
        collaborating(trainer, peer, **options)
        trainer.train(resume_from_checkpoint=True)
        trainer.optimizer.train()
        assert training_loss(trainer) == pytest.approx(trained, abs=1e-4)


class Saves(transformers.TrainerCallback):
    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


class Stream(torch.utils.data.IterableDataset):
    """Data without a length."""

    def __init__(self) -> None:
        self.passes: list[int] = []

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.passes.append(0)
        for sample in dataset(40, 1):
            self.passes[-1] += 1
            yield sample


def test_a_stream_is_read_to_its_end_and_then_again(tmp_path: Path) -> None:
    with peers(1) as (peer,):
        stream = Stream()
        trainer = transformers.Trainer(Tagger(), arguments(tmp_path, max_steps=4), train_dataset=stream)
        collaborating(trainer, peer)
        trainer.train()
        assert trainer.state.global_step == 4
    assert stream.passes[:2] == [40, 40], "each pass has more batches than there are global steps"
    assert len(stream.passes) == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_steps": -1}, r"max_steps=-1: epochs end at another step on each peer; .*max_steps=1000"),
        ({"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"}, "leave it out"),
    ],
)
def test_arguments_that_do_not_fit_a_run_are_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    trainer = transformers.Trainer(
        Tagger(), arguments(tmp_path, **options), train_dataset=dataset(4, 1), eval_dataset=dataset(4, 1)
    )
    with peers(1) as (peer,), pytest.raises(ConfigError, match=says):
        collaborating(trainer, peer)


def test_missing_and_superfluous_arguments_of_the_callback_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CollaborativeCallback\(trainer, peer=peer, run_id="):
        CollaborativeCallback(made(tmp_path))
    made_late = transformers.Trainer(model_init=Tagger, args=arguments(tmp_path))
    with pytest.raises(ConfigError, match=r"Trainer\(model_init\(\), "):
        CollaborativeCallback(made_late)
    several = made(tmp_path)
    several.args._n_gpu = 2  # noqa: SLF001 (transformers counts them once, and has no public way to say so)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2 "):
        CollaborativeCallback(several)
    with peers(1) as (peer,):
        forgotten = made(tmp_path)
        callback = CollaborativeCallback(forgotten, peer=peer, **OPTIONS)
        with pytest.raises(ConfigError, match=r"trainer.add_callback\(callback\)"):
            forgotten.train()
        callback.optimizer.close()
        model = Tagger()
        optimizer = manyhands.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), peer=peer, **OPTIONS)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        trainer = transformers.Trainer(model, arguments(tmp_path), optimizers=(optimizer, schedule))
        with pytest.raises(ConfigError, match="scheduler=lambda inner"):
            CollaborativeCallback(trainer)
        with pytest.raises(ConfigError, match="has a manyhands optimizer already; give run_id to that one"):
            CollaborativeCallback(trainer, run_id="another")
