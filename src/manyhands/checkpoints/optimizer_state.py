"""The state of an optimizer in files that run no code when they are read: safetensors, and JSON for the rest.

In the JSON, ``{"$tensor": NAME}`` stands for a tensor, ``{"$tuple": [...]}`` for a tuple, and ``{"$items": [[KEY,
VALUE], ...]}`` for a dict whose keys are not all plain text. All values come back as they were, to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from manyhands.base.errors import ConfigError
from manyhands.checkpoints.checkpoint_dir import OPTIMIZER_TENSORS, OPTIMIZER_VALUES

_TENSOR, _TUPLE, _ITEMS = "$tensor", "$tuple", "$items"


def save_state(state: Mapping[str, Any], folder: Path) -> None:
    """Write the result of an optimizer's ``state_dict()``.

    Raises:
        ConfigError: a value in it is neither a tensor nor plain; names it.
    """
    tensors = _Tensors()
    values = _without_tensors(dict(state), "", tensors)
    save_file(tensors.by_name, folder / OPTIMIZER_TENSORS)
    (folder / OPTIMIZER_VALUES).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def load_state(folder: Path) -> dict[str, Any]:
    """Read what :func:`save_state` has written; tensors are on the CPU."""
    values = json.loads((folder / OPTIMIZER_VALUES).read_text(encoding="utf-8"))
    state: dict[str, Any] = _with_tensors(values, load_file(folder / OPTIMIZER_TENSORS))
    return state


class _Tensors:
    """Collects tensors, each in memory of its own: safetensors takes no views, and none twice."""

    def __init__(self) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self._seen: set[int] = set()

    def add(self, name: str, tensor: torch.Tensor) -> str:
        """Add a tensor; returns its name, which differs from ``name`` if that is taken: ``a.b`` may be a key too."""
        while name in self.by_name:
            name += "'"
        tensor = tensor.detach().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in self._seen:
            tensor = tensor.clone()
        self._seen.add(tensor.data_ptr())
        self.by_name[name] = tensor
        return name


def _without_tensors(value: Any, name: str, tensors: _Tensors) -> Any:
    if isinstance(value, torch.Tensor):
        return {_TENSOR: tensors.add(name, value)}
    if type(value) is dict:
        items = {
            key: _without_tensors(item, f"{name}.{key}" if name else f"{key}", tensors) for key, item in value.items()
        }
        if all(isinstance(key, str) and not key.startswith("$") for key in items):
            return items
        return {_ITEMS: [[_without_tensors(key, name, tensors), item] for key, item in items.items()]}
    if isinstance(value, (list, tuple)):
        listed = [_without_tensors(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
        return {_TUPLE: listed} if isinstance(value, tuple) else listed
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(
        f"{name} in the optimizer's state is a {type(value).__name__}, and a checkpoint holds tensors, numbers and text"
    )


def _with_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_with_tensors(value[_TUPLE], tensors))
    if _ITEMS in value:
        return {_with_tensors(key, tensors): _with_tensors(item, tensors) for key, item in value[_ITEMS]}
    return {key: _with_tensors(item, tensors) for key, item in value.items()}
