"""Describes a tensor that peers share. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

COMPILED = "_orig_mod"
"""What ``torch.compile`` puts into the names of what it has wrapped."""
PARALLEL = "module."
"""What ``DistributedDataParallel`` and ``DataParallel`` put before all names."""


class ParameterSpec(msgspec.Struct, frozen=True):
    """Name, shape and dtype of one tensor; dtype as in ``float32``."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def bare_names(names: Iterable[str]) -> list[str]:
    """Names of parameters or buffers as the model itself has them, whatever wraps it or a part of it on this peer."""
    bare = [".".join(part for part in name.split(".") if part != COMPILED) for name in names]
    while bare and all(name.startswith(PARALLEL) for name in bare):
        bare = [name.removeprefix(PARALLEL) for name in bare]
    return bare
