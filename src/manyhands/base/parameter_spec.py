"""Describes a tensor that peers share. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

COMPILED = "_orig_mod"
"""Part that ``torch.compile`` adds to the name of each parameter of a wrapped module."""

PARALLEL = "module."
"""Prefix that ``DistributedDataParallel`` and ``DataParallel`` add to all names."""


class ParameterSpec(msgspec.Struct, frozen=True):
    """Name, shape and dtype of one tensor; dtype as in ``float32``."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def bare_names(names: Iterable[str]) -> list[str]:
    """Return names of parameters or buffers without what wrappers of the model, or of parts of it, have added."""
    bare = [".".join(part for part in name.split(".") if part != COMPILED) for name in names]
    while bare and all(name.startswith(PARALLEL) for name in bare):
        bare = [name.removeprefix(PARALLEL) for name in bare]
    return bare
