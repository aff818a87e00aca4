"""accelerate and its accumulation of gradients: samples count once, or it is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator

import manyhands
from manyhands.base.errors import ConfigError
from manyhands.training.accelerate import counted
from tests.accelerators import forget_accelerator
from tests.trainers import AVERAGING, BATCH_SIZE, FAST, new_model, peers


@pytest.fixture(autouse=True)
def accelerate_is_as_before() -> Iterator[None]:
    """It keeps its state for the whole process."""
    yield
    forget_accelerator()


def train(
    num_accumulated: int,
    num_samples: int,
    *,
    is_counted: bool = False,
    local_steps: manyhands.LocalSteps | None = None,
) -> tuple[manyhands.Optimizer, torch.nn.Module]:
    """The loop of accelerate's documentation."""
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(num_samples, 5, generator=generator))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_accumulated)
    with peers(1) as (peer,):
        plain = new_model()
        optimizer = manyhands.Optimizer(
            torch.optim.SGD(plain.parameters(), lr=0.1), peer=peer, run_id="accelerate",
            target_batch_size=2 * BATCH_SIZE, batch_size_per_step=BATCH_SIZE, averaging=AVERAGING, progress=FAST,
            local_steps=local_steps,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE)
        model, prepared, loader = accelerator.prepare(plain, optimizer, loader)
        for (inputs,) in counted(loader, prepared, accelerator) if is_counted else loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).square().mean())
                prepared.step()
                prepared.zero_grad()
        copy.deepcopy(plain)
        torch.save(plain, io.BytesIO())
        optimizer.close()
        return optimizer, plain


def test_without_accumulation_every_sample_counts() -> None:
    optimizer, _ = train(1, 8 * BATCH_SIZE)
    assert optimizer.statistics.samples_used == 8 * BATCH_SIZE
    assert optimizer.global_step == 4


def test_each_counted_batch_is_a_local_step() -> None:
    """A peer alone makes the steps of plain SGD; those since the last average are in the model as well."""
    num_samples = 5 * BATCH_SIZE
    optimizer, model = train(1, num_samples, is_counted=True, local_steps=manyhands.LocalSteps())
    assert optimizer.statistics.samples_computed == num_samples
    expected = new_model()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for inputs in torch.randn(num_samples, 5, generator=torch.Generator().manual_seed(1)).split(BATCH_SIZE):
        expected(inputs).square().mean().backward()
        plain.step()
        plain.zero_grad()
    for value, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, right, atol=1e-5, rtol=0)


def test_accumulation_is_refused_with_local_steps() -> None:
    """Each of the batches would be a step, three times as many as were asked for."""
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=3 does not work with local_steps.*3 times as"):
        train(3, 4 * BATCH_SIZE, is_counted=True, local_steps=manyhands.LocalSteps())


@pytest.mark.parametrize("num_accumulated", [1, 3])
def test_with_counted_batches_the_update_does_not_depend_on_the_split(num_accumulated: int) -> None:
    """Of each three batches one is short, or none follows."""
    optimizer, model = train(num_accumulated, 2 * BATCH_SIZE + 3 * BATCH_SIZE - 1, is_counted=True)
    assert optimizer.statistics.samples_computed == 5 * BATCH_SIZE - 1
    assert optimizer.statistics.samples_used == 4 * BATCH_SIZE
    assert optimizer.samples_accumulated == BATCH_SIZE - 1, "not those of a whole batch"
    assert optimizer.global_step == 2
    whole = torch.randn(5 * BATCH_SIZE - 1, 5, generator=torch.Generator().manual_seed(1))
    expected = new_model()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for inputs in whole[: 4 * BATCH_SIZE].chunk(2):
        expected(inputs).square().mean().backward()
        plain.step()
        plain.zero_grad()
    for value, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, right, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_batches", [4, 3], ids=["whole", "the last one shorter"])
def test_accumulation_is_refused_before_a_sample_is_lost(num_batches: int) -> None:
    with pytest.raises(ConfigError, match=r"by itself(.|\n)* for batch in .*accelerate.counted\(") as raised:
        train(2, num_batches * BATCH_SIZE)
    assert "trainer.add_callback(manyhands.training.transformers.CollaborativeCallback(trainer))" in str(raised.value)


def test_a_plain_loop_may_make_several_backward_passes_before_a_step() -> None:
    """``batch_size_per_step`` is what is behind a call of step()."""
    with peers(1) as (peer,):
        model = new_model()
        optimizer = manyhands.Optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), peer=peer, run_id="plain", target_batch_size=16,
            batch_size_per_step=8, averaging=AVERAGING, progress=FAST,
        )  # fmt: skip
        for _ in range(2):
            for _ in range(2):
                (model(torch.randn(4, 5)).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.statistics.samples_used == 16
