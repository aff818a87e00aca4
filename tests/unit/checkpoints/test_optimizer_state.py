"""The state of an optimizer comes back from its files as it was, to the last bit and type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.base.errors import ConfigError
from manyhands.checkpoints.optimizer_state import load_state, save_state
from manyhands.optim.lamb import Lamb


def assert_same(one: Any, other: Any, name: str = "") -> None:
    assert type(one) is type(other), name
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, name
        assert one.shape == other.shape, name
        one, other = (tensor.flatten().contiguous().view(torch.uint8) for tensor in (one, other))
        assert torch.equal(one, other), name
    elif isinstance(one, dict):
        assert list(one) == list(other), name
        for key in one:
            assert_same(one[key], other[key], f"{name}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), name
        for index, (item, its_copy) in enumerate(zip(one, other, strict=True)):
            assert_same(item, its_copy, f"{name}.{index}")
    else:
        assert repr(one) == repr(other), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), amsgrad=True, foreach=False),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-45, momentum=0.9),
        lambda parameters: torch.optim.Rprop(parameters),
        lambda parameters: torch.optim.NAdam(parameters, betas=(0.1 + 0.2, 0.999)),
        lambda parameters: torch.optim.Adafactor(parameters),
        lambda parameters: Lamb(parameters, clamp_value=float("inf")),
    ],
)
def test_states_of_many_optimizers_come_back_as_saved(make: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.Flatten(), torch.nn.Linear(12, 2)).to(dtype)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = make(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 2, 3, 3, dtype=dtype)).sum().backward()
        optimizer.step()
    save_state(optimizer.state_dict(), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["optimizer.json", "optimizer.safetensors"]
    assert_same(contiguous(optimizer.state_dict()), load_state(tmp_path))


def contiguous(value: Any) -> Any:
    """Strides are not kept: torch gives the state those of its parameters."""
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    if isinstance(value, dict):
        return {key: contiguous(item) for key, item in value.items()}
    return type(value)(contiguous(item) for item in value) if isinstance(value, (list, tuple)) else value


def test_shared_tensors_views_and_odd_values_come_back_as_saved(tmp_path: Path) -> None:
    buffer = torch.arange(6.0)
    state = {
        "one tensor twice": [buffer, buffer],
        "views": (buffer[:2], buffer[1:5:2], buffer.view(2, 3).t()),
        "shapes": [torch.tensor(1.5), torch.zeros(0, 3), torch.tensor([True]), torch.tensor([float("nan"), -0.0])],
        "numbers": [float("inf"), -float("inf"), float("nan"), -0.0, 0.1, 2**70, True, None],
        "texts": ["", "ä", "$tensor"],
        "$tensor": {"$tuple": {"$items": ()}},
        "names": {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 0: torch.tensor(3), "0": torch.tensor(4)},
        3: {(0, "a"): {"b": []}, None: {}},
    }
    save_state(state, tmp_path)
    assert_same(state, load_state(tmp_path))


def test_a_function_in_the_optimizer_state_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state\.0\.hook in the optimizer's state is a builtin_function"):
        save_state({"state": {0: {"hook": print}}}, tmp_path)
    assert not list(tmp_path.iterdir())
