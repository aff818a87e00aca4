"""An optimizer's state as plain values, which run no code when they are read, and its tensors, which are kept apart.

``{"$tensor": PLACE}`` stands for a tensor, ``{"$tuple": [...]}`` for a tuple, ``{"$items": [[KEY, VALUE], ...]}`` for a
dict whose keys are not all plain text, ``{"$numpy": [TYPE, VALUE]}`` for a number of NumPy, and ``{"$integer": HEX}``
for an integer of more than 64 bits. All values come back as they were, to the last bit; dicts of other kinds as dicts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from manyhands.base.errors import ConfigError
from manyhands.optim.serializable import MAX_DEPTH

HELD = "tensors, numbers, text, None, and lists, tuples and dicts of these"
"""The values that can be saved in a checkpoint, and sent to a newcomer."""
_TENSOR, _TUPLE, _ITEMS, _NUMPY, _INTEGER = "$tensor", "$tuple", "$items", "$numpy", "$integer"
_NUMPY_TYPES = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"}
)
_INTEGERS = range(-(1 << 63), 1 << 64)
"""The integers that msgpack can hold."""


def encoded(value: Any, name: str, place_of: Callable[[str, torch.Tensor], Any], *, sorts: bool = False) -> Any:
    """Encode a value of an optimizer's state as plain values.

    Args:
        name: of the value, for the names of its tensors and for errors.
        place_of: is given the name of each tensor and the tensor; returns the place at which the caller keeps it.
        sorts: put dicts into the order of their keys, so that equal dicts have equal tensors in each place.
    Raises:
        ConfigError: it contains a value of another kind than those in ``HELD``; names it.
    """

    def plain(value: Any, name: str, max_depth: int) -> Any:
        if max_depth < 0:
            raise ConfigError(f"{name} in the optimizer's state is nested more than {MAX_DEPTH} deep")
        if isinstance(value, torch.Tensor):
            return {_TENSOR: place_of(name, value)}
        if isinstance(value, dict):
            is_text = all(type(key) is str and not key.startswith("$") for key in value)
            pairs = sorted(value.items(), key=lambda pair: pair[0]) if is_text and sorts else value.items()
            items = {key: plain(item, f"{name}.{key}" if name else f"{key}", max_depth - 1) for key, item in pairs}
            if is_text:
                return items
            return {_ITEMS: [[plain(key, name, max_depth - 1), item] for key, item in items.items()]}
        if type(value) in (list, tuple, torch.Size):
            listed = [plain(item, f"{name}.{index}", max_depth - 1) for index, item in enumerate(value)]
            return listed if isinstance(value, list) else {_TUPLE: listed}
        return _plain_number(value, name)

    return plain(value, name, MAX_DEPTH)


def _plain_number(value: Any, name: str) -> Any:
    """:func:`encoded` for a number, a text or None."""
    if value is None or isinstance(value, bool):
        return value
    if type(value).__module__ == "numpy" and str(getattr(value, "dtype", "")) in _NUMPY_TYPES and value.ndim == 0:
        return {_NUMPY: [str(value.dtype), value.item()]}
    if isinstance(value, int):
        return int(value) if value in _INTEGERS else {_INTEGER: hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return "".join(value)  # plain text, if it is that of an enumeration, say
    raise ConfigError(
        f"{name} in the optimizer's state is a {type(value).__name__}, which can neither be sent to a newcomer nor be "
        f"saved in a checkpoint; an optimizer whose state has only {HELD} is needed"
    )


def decoded(value: Any, tensor_at: Callable[[Any], torch.Tensor]) -> Any:
    """The value that :func:`encoded` was given.

    Args:
        tensor_at: returns the tensor at a place; raises ``ValueError`` if there is none.
    Raises:
        ValueError: ``value`` is not a result of :func:`encoded`.
    """

    def restored(value: Any, max_depth: int) -> Any:
        if max_depth < 0:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        if isinstance(value, list):
            return [restored(item, max_depth - 1) for item in value]
        if not isinstance(value, dict):
            return value
        kind = next(iter(value)) if len(value) == 1 else ""
        if not isinstance(kind, str) or not kind.startswith("$"):
            return {key: restored(item, max_depth - 1) for key, item in value.items()}
        if kind == _TENSOR:
            return tensor_at(value[kind])
        if kind == _TUPLE:
            return tuple(restored(item, max_depth - 1) for item in value[kind])
        if kind == _ITEMS:
            return {restored(key, max_depth - 1): restored(item, max_depth - 1) for key, item in value[kind]}
        if kind == _INTEGER:
            return int(value[kind], 16)
        if kind == _NUMPY:
            return _numpy_number(*value[kind])
        raise ValueError(f"it has a value of the unknown kind {kind!r}")

    try:
        return restored(value, MAX_DEPTH)
    except (TypeError, ValueError, OverflowError, ImportError) as error:
        raise ValueError(f"the optimizer's state in it cannot be read: {error}") from error


def _numpy_number(name: str, value: Any) -> Any:
    if name not in _NUMPY_TYPES or not isinstance(value, (bool, int, float)):
        raise ValueError(f"{value!r} is no {name} of NumPy")
    import numpy  # only here, as NumPy need not be installed

    return numpy.dtype(name).type(value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a value of nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a value of nested dicts, lists and tuples, with ``change`` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = copy.copy(value)  # keeps the type: it may be a subclass of dict
        changed.update({key: with_tensors(item, change) for key, item in value.items()})
        return changed
    if isinstance(value, list):
        return [with_tensors(item, change) for item in value]
    if type(value) is tuple:
        return tuple(with_tensors(item, change) for item in value)
    return value
