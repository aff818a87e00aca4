from __future__ import annotations

from itertools import islice

import pytest
import torch

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.batches import Batches
from manyhands.recipes.albert.compute import Compute
from manyhands.recipes.albert.model import build_model, loss_of


@pytest.mark.parametrize("device", ["cuda:77", "cuda:999", "xpu"])
def test_a_device_that_cannot_be_used_is_named(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{device}' cannot be used here: .+; for example cpu"):
        Compute(device, "auto")


@pytest.mark.parametrize("device", ["gpu", "", "cpu:x"])
def test_a_mistyped_device_is_answered_with_those_that_are_used(device: str) -> None:
    with pytest.raises(ConfigError, match=f"^device '{device}' is unknown; write auto, cpu, cuda, cuda:1 or mps$"):
        Compute(device, "auto")


def test_a_gpu_that_does_not_work_is_not_taken_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # and there is none
    assert str(Compute("auto", "auto")) == "cpu in float32"
    assert "Computing on the CPU, since the GPU cannot be used" in caplog.text


def test_the_cpu_computes_in_float32() -> None:
    compute = Compute("cpu", "auto")
    assert str(compute) == "cpu in float32"
    assert not compute.scaler.is_enabled()
    with compute.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize(("precision", "num_warnings"), [("auto", 0), ("float32", 0), ("bfloat16", 0), ("float16", 1)])
def test_float16_on_a_cpu_is_warned_of(precision, num_warnings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "manyhands")
    Compute("cpu", precision).log_choice()
    assert "Computing on cpu in" in caplog.text
    assert caplog.text.count("leave out --precision (--fp16)") == num_warnings


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((6, 1), torch.float32), ((7, 0), torch.float16), ((7, 5), torch.float16), ((8, 0), torch.bfloat16)],
)
def test_a_gpu_computes_in_the_half_precision_that_it_has_units_for(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    from manyhands.recipes.albert import compute

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert compute.dtype_for(torch.device("cuda"), "auto") == dtype
    assert compute.dtype_for(torch.device("cuda"), "float32") == torch.float32
    assert compute.dtype_for(torch.device("mps"), "auto") == torch.float32


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_in_half_precision_the_gradients_are_nearly_the_same_and_float32(precision, recipe, tokenizer, samples):
    gradients = []
    for compute in (Compute("cpu", "float32"), Compute("cpu", precision)):
        model = build_model(recipe, len(tokenizer))
        (batch,) = islice(Batches(samples, recipe, "peer"), 1)
        with compute.autocast():
            loss = loss_of(model, batch)
        scale = compute.scaler.get_scale()
        compute.scaler.scale(loss).backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
        gradients.append(torch.cat([parameter.grad.flatten() / scale for parameter in model.parameters()]))
    assert compute.scaler.is_enabled() == (precision == "float16")
    similarity = torch.nn.functional.cosine_similarity(*gradients, dim=0)
    assert similarity > 0.99


def test_too_little_memory_is_told_with_the_option_to_lower() -> None:
    compute = Compute("cpu", "float32")
    message = "a batch of 8 samples does not fit into the memory of cpu in float32; lower it"
    with pytest.raises(ConfigError, match=message), compute.fitting("a batch of 8 samples", "lower it"):
        torch.empty(1 << 60)  # more than any machine has
    with pytest.raises(RuntimeError, match="mat1 and mat2"), compute.fitting("a batch", "lower it"):
        torch.ones(2, 3) @ torch.ones(2, 3)
