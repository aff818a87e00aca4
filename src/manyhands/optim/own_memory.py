"""Whether anybody else can see what is in the memory of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_num_tensors_of: Callable[[Any], int] | None = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001
"""References to the memory of tensors; without it none is taken for a tensor's own."""
_ONE_TENSOR = 2
"""What it says of the memory of one tensor, while that is asked for."""


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether no other tensor or array lies in the memory of this one, as far as torch knows."""
    storage = tensor.untyped_storage()
    return _num_tensors_of is not None and _num_tensors_of(storage._cdata) == _ONE_TENSOR  # noqa: SLF001
