"""The state of an optimizer in files that run no code when they are read: safetensors, and JSON for the rest.

The JSON is that of :mod:`manyhands.optim.state.tree`, in which each tensor is replaced by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from manyhands.checkpoints.checkpoint_dir import OPTIMIZER_TENSORS, OPTIMIZER_VALUES
from manyhands.optim.state.tree import decoded, encoded


def save_state(state: Mapping[str, Any], folder: Path) -> None:
    """Write the result of an optimizer's ``state_dict()``.

    Raises:
        ConfigError: a value in it cannot be saved; names it.
    """
    tensors = _Tensors()
    values = encoded(dict(state), "", tensors.add)
    save_file(tensors.by_name, folder / OPTIMIZER_TENSORS)
    (folder / OPTIMIZER_VALUES).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def load_state(folder: Path) -> dict[str, Any]:
    """Read what :func:`save_state` has written; tensors are on the CPU."""
    values = json.loads((folder / OPTIMIZER_VALUES).read_text(encoding="utf-8"))
    state: dict[str, Any] = decoded(values, load_file(folder / OPTIMIZER_TENSORS).__getitem__)
    return state


class _Tensors:
    """Collects tensors, each in memory of its own: safetensors saves no views and no tensor twice."""

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
