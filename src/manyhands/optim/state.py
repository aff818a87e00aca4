"""The state of a run at one global step: all that a newcomer needs, as bytes with a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from manyhands.averaging.butterfly import bytes_of
from manyhands.averaging.messages import Position
from manyhands.optim.run_manifest import TensorSpec

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool
)}  # fmt: skip


class StateHeader(msgspec.Struct, frozen=True):
    """Describes a state; its tensors follow in this order, as raw little-endian bytes.

    Attributes:
        tensors: parameters first, then the optimizer's tensors, named ``parameter.statistic``.
        scalars: msgpack of everything else: hyper-parameters, counters of the optimizer and the scheduler.
        digest: SHA-256 over ``tensors``, ``scalars`` and all bytes.
    """

    position: Position
    lineage_samples: int
    tensors: list[TensorSpec]
    scalars: bytes
    digest: bytes


@dataclass(frozen=True)
class State:
    """A state in memory that nothing else changes."""

    header: StateHeader
    tensors: list[torch.Tensor]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def specs_of(optimizer: torch.optim.Optimizer) -> list[TensorSpec]:
    """Name, shape and dtype of all parameters; without names they are numbered."""
    names = [name for group in optimizer.param_groups for name in group.get("param_names", [])]
    parameters = parameters_of(optimizer)
    if len(names) != len(parameters):
        names = [f"parameter {index}" for index in range(len(parameters))]
    return [_spec(name, parameter) for name, parameter in zip(names, parameters, strict=True)]


def capture(
    optimizer: torch.optim.Optimizer, scheduler_state: dict[str, Any], position: Position, lineage_samples: int
) -> State:
    """Copy the state of a run. Nothing else may change it meanwhile."""
    parameters = parameters_of(optimizer)
    tensors = [_copy(parameter) for parameter in parameters]
    specs = [_spec(f"{index}", parameter) for index, parameter in enumerate(parameters)]
    packed = optimizer.state_dict()
    plain_state: dict[str, dict[str, Any]] = {}
    for index in sorted(packed["state"]):
        for name, value in sorted(packed["state"][index].items()):
            if isinstance(value, torch.Tensor):
                tensors.append(_copy(value))
                specs.append(_spec(f"{index}.{name}", value))
            else:
                plain_state.setdefault(str(index), {})[name] = value
    groups = [{name: value for name, value in group.items() if name != "params"} for group in packed["param_groups"]]
    scalars = msgspec.msgpack.encode(
        {"state": plain_state, "groups": groups, "scheduler": scheduler_state}, order="sorted"
    )
    digest = digest_of(specs, scalars, tensors)
    return State(StateHeader(position, lineage_samples, specs, scalars, digest), tensors)


def digest_of(specs: Sequence[TensorSpec], scalars: bytes, tensors: Sequence[torch.Tensor]) -> bytes:
    """SHA-256 of a state's content, wherever it came from."""
    sha256 = hashlib.sha256(msgspec.msgpack.encode([list(specs), scalars]))
    for tensor in tensors:
        sha256.update(as_bytes(tensor))
    return sha256.digest()


def restore(state: State, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Write a state into an optimizer and its parameters; returns the scheduler's state.

    Raises:
        ValueError: the state does not fit; nothing was changed.
    """
    parameters = parameters_of(optimizer)
    scalars = msgspec.msgpack.decode(state.header.scalars)
    groups, own = scalars["groups"], optimizer.state_dict()
    if len(groups) != len(own["param_groups"]):
        raise ValueError(f"the state has {len(groups)} parameter groups, the optimizer {len(own['param_groups'])}")
    statistics: dict[int, dict[str, Any]] = {int(index): dict(plain) for index, plain in scalars["state"].items()}
    for spec, tensor in zip(state.header.tensors[len(parameters) :], state.tensors[len(parameters) :], strict=True):
        index, _, name = spec.name.partition(".")
        if not 0 <= int(index) < len(parameters) or tensor.numel() not in (1, parameters[int(index)].numel()):
            raise ValueError(f"the statistic {spec.name} of shape {list(spec.shape)} fits no parameter")
        statistics.setdefault(int(index), {})[name] = tensor.clone()
    with torch.no_grad():
        for parameter, tensor in zip(parameters, state.tensors, strict=False):
            parameter.copy_(tensor)
    param_groups = [group | {"params": mine["params"]} for group, mine in zip(groups, own["param_groups"], strict=True)]
    optimizer.load_state_dict({"state": statistics, "param_groups": param_groups})
    scheduler: dict[str, Any] = scalars["scheduler"]
    return scheduler


def empty_tensors(specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Memory to receive tensors into.

    Raises:
        ValueError: an unknown dtype or a negative size.
    """
    for spec in specs:
        if spec.dtype not in _DTYPES or any(size < 0 for size in spec.shape):
            raise ValueError(f"a tensor of dtype {spec.dtype} and shape {list(spec.shape)} cannot be received")
    return [torch.empty(spec.shape, dtype=_DTYPES[spec.dtype]) for spec in specs]


def num_bytes_of(specs: Sequence[TensorSpec]) -> int:
    """Size of all tensors together."""
    return sum(torch.Size(spec.shape).numel() * _DTYPES[spec.dtype].itemsize for spec in specs)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype."""
    return bytes_of(tensor.reshape(-1).view(torch.uint8))


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
