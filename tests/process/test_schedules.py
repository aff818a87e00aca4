"""Two processes with schedules and accumulation as torch, accelerate and transformers users write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.commands import Command
from tests.sweeps import few_of

pytestmark = pytest.mark.process

PROGRAM = """
import json, os, pathlib, sys, tempfile
import torch
import manyhands
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, MultiplicativeLR

way, here, *addresses = sys.argv[1:]
if way.startswith("accelerate"):  # now, as nobody trains while the other one still imports
    import accelerate
elif way.startswith("Trainer"):
    import transformers
LISTEN = ["/ip4/127.0.0.1/tcp/0"]
BATCHES, BATCH_SIZE = 60, 4

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x) - labels).square().mean()}

model = Model()
data = [{"x": torch.randn(3), "labels": torch.randn(1)} for _ in range(BATCHES * BATCH_SIZE)]

def batches():
    return torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE)

def plain(schedule):
    for batch in batches():
        model(**batch)["loss"].backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

def accelerated(num_accumulated, is_counted=False):
    from accelerate import Accelerator
    from manyhands.training.accelerate import counted
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_accumulated)
    prepared, wrapped, loader = accelerator.prepare(model, optimizer, batches())
    for batch in counted(loader, wrapped, accelerator) if is_counted else loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch)["loss"])
            wrapped.step()
            wrapped.zero_grad()

def trained(schedule, num_accumulated, is_collaborative=False):
    from transformers import Trainer, TrainingArguments
    from manyhands.training.transformers import CollaborativeCallback
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=BATCH_SIZE, max_steps=10, use_cpu=True, report_to=[],
        gradient_accumulation_steps=num_accumulated, save_strategy="no", disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule))
    if is_collaborative:
        trainer.add_callback(CollaborativeCallback(trainer))
    trainer.train()

with manyhands.Peer(initial_peers=addresses, listen=LISTEN) as peer:
    optimizer = manyhands.Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), peer=peer, run_id="schedules", target_batch_size=24,
        batch_size_per_step=BATCH_SIZE, scheduler=lambda inner: ExponentialLR(inner, 0.98),
    )
    print("ADDRESS", peer.addresses[0], flush=True)
    while len(list(pathlib.Path(here).iterdir())) < 2:  # until both have seen that they are two
        if optimizer.num_peers == 2:
            pathlib.Path(here, str(os.getpid())).touch()
        peer.sleep(0.1)
        optimizer.step(batch_size=0)
    try:
        match way:
            case "own schedule in the loop": plain(CosineAnnealingLR(optimizer, 100))
            case "one that changes nothing": plain(MultiplicativeLR(optimizer, lambda _: 1.0))
            case "accelerate": accelerated(2, is_counted=True)
            case "accelerate accumulates": accelerated(2)
            case "Trainer": trained(None, 2, is_collaborative=True)
            case "Trainer with its own schedule": trained(None, 1)
            case "Trainer accumulates": trained(MultiplicativeLR(optimizer, lambda _: 1.0), 2)
    finally:
        counts = optimizer.statistics
        facts = dict(
            step=optimizer.global_step, rate=optimizer.param_groups[0]["lr"], computed=counts.samples_computed,
            accounted=counts.samples_used + counts.samples_dropped + optimizer.samples_accumulated,
            rounds=counts.rounds_committed,
        )
        print("SAYS", json.dumps(facts), flush=True)
    optimizer.wait_for_others(10.0)
"""


@contextmanager
def two(way: str, here: Path) -> Iterator[list[Command]]:
    first = Command(["-c", PROGRAM, way, str(here)], module=None)
    commands = [first]
    try:
        commands.append(Command(["-c", PROGRAM, way, str(here), first.wait_for("ADDRESS").split()[1]], module=None))
        yield commands
    finally:
        for command in commands:
            command.close()


@pytest.mark.long
@pytest.mark.parametrize("way", few_of(["Trainer", "accelerate", "one that changes nothing"]))
def test_the_rate_goes_by_the_global_step_and_all_samples_count(way: str, tmp_path: Path) -> None:
    with two(way, tmp_path) as commands:
        for command in commands:
            said = json.loads(command.wait_for("SAYS").split("SAYS")[1])
            assert said["computed"] == said["accounted"]
            assert said["step"] == 10 if way == "Trainer" else said["computed"] == 60 * 4
            assert said["rate"] == pytest.approx(0.1 * 0.98 ** said["step"])
            assert said["rounds"] > 0, "they made steps together"


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "says", "write"),
    few_of(
        [
            (
                "own schedule in the loop",
                "ConfigError: the option 'lr' was 0.1 and is 0.09997",
                "scheduler=lambda inner: CosineAnnealingLR(inner, ",
            ),
            (
                "Trainer with its own schedule",
                "ConfigError: the option 'lr' was 0.1 and is 0.09",
                "trainer.add_callback(manyhands.training.transformers.CollaborativeCallback(trainer))",
            ),
            (
                "accelerate accumulates",
                "ConfigError: accelerate accumulates",
                "accelerate.counted(loader, optimizer, acc",
            ),
            (
                "Trainer accumulates",
                "ConfigError: accelerate accumulates",
                "transformers.CollaborativeCallback(trainer))",
            ),
        ]
    ),
)
def test_loops_that_would_train_wrongly_are_refused_with_the_lines_to_write(
    way: str, says: str, write: str, tmp_path: Path
) -> None:
    with two(way, tmp_path) as commands:
        for command in commands:
            said = json.loads(command.wait_for("SAYS").split("SAYS")[1])
            assert said["computed"] <= 4, "before the second batch is counted"
            assert said["rounds"] == 0
            assert command.wait() == 1
            assert says in command.output
            assert write in command.output
