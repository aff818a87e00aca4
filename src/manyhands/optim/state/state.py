"""The state of a run at one global step: all that a newcomer needs, as bytes with a digest."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
import torch

from manyhands.averaging.memory import bytes_of
from manyhands.averaging.messages import Count, PeerIdText, Position
from manyhands.base.identity import PeerId
from manyhands.base.structs import make_ready
from manyhands.optim.manifest import ParameterSpec
from manyhands.optim.serializable import merged, plain_part

MAX_STATISTICS_PER_PARAMETER = 8
MAX_DIMENSIONS = 32
MAX_CONTRIBUTORS = 4096
LOCAL_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""How an optimizer computes on this machine, not what: not part of the state, and may differ between peers."""

DTYPES_OF_STATES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
"""Of tensors that can be sent to a newcomer."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES_OF_STATES}

_MISFITS = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)
"""Exceptions of optimizers that load another kind's statistics."""


class Origin(msgspec.Struct, frozen=True):
    """The step that led to a state.

    Attributes:
        parent: the position before it.
        contributors: all peers whose samples may count in it; None if not all are known, as in a grid of groups.
    """

    parent: Position
    contributors: Annotated[list[PeerIdText], msgspec.Meta(max_length=MAX_CONTRIBUTORS)] | None = None


class StateHeader(msgspec.Struct, frozen=True):
    """Describes a state; its tensors follow in this order, as raw little-endian bytes.

    Attributes:
        tensors: parameters first, then the optimizer's tensors, named ``parameter.statistic``.
        scalars: msgpack of :class:`Scalars`.
        digest: SHA-256 over ``tensors``, ``scalars`` and all bytes.
        origin: the step that led there; None if unknown, as after a checkpoint was loaded.
    """

    position: Position
    lineage_samples: Count
    tensors: list[ParameterSpec]
    scalars: bytes
    digest: bytes
    origin: Origin | None = None


class Scalars(msgspec.Struct):
    """The part of a state that is not in tensors.

    Attributes:
        statistics: of the optimizer, by index of the parameter, written as a decimal number.
        groups: the hyper-parameters of each parameter group.
        scheduler: its state.
    """

    statistics: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    scheduler: dict[str, Any]


make_ready(Scalars)


@dataclass(frozen=True)
class State:
    """A state in memory, with tensors of its own.

    Attributes:
        recent_rounds: in a grid, of the steps that led there; see :mod:`manyhands.optim.run.partition_detector`.
        donor: the peer that sent it.
    """

    header: StateHeader
    tensors: list[torch.Tensor]
    recent_rounds: list[bytes] = field(default_factory=list)
    donor: PeerId | None = None


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def names_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of all parameters; numbers if they have no names."""
    names = [name for group in optimizer.param_groups for name in group.get("param_names", [])]
    num_parameters = len(parameters_of(optimizer))
    return names if len(names) == num_parameters else [f"parameter {index}" for index in range(num_parameters)]


def specs_of(optimizer: torch.optim.Optimizer) -> list[ParameterSpec]:
    """Name, shape and dtype of all parameters."""
    named = zip(names_of(optimizer), parameters_of(optimizer), strict=True)
    return [_spec(name, parameter) for name, parameter in named]


def hyper_parameters_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The part of each parameter group that is sent."""
    return [
        {name: plain_part(_number(value)) for name, value in group.items() if name not in {"params", *LOCAL_OPTIONS}}
        for group in groups
    ]


def capture(
    optimizer: torch.optim.Optimizer,
    scheduler_state: dict[str, Any],
    position: Position,
    lineage_samples: int,
    origin: Origin | None = None,
) -> State:
    """Copy the state of a run, without its digest. Nothing else may change it meanwhile."""
    parameters = parameters_of(optimizer)
    tensors = [_copy(parameter) for parameter in parameters]
    specs = [_spec(f"{index}", parameter) for index, parameter in enumerate(parameters)]
    packed = optimizer.state_dict()
    statistics: dict[str, dict[str, Any]] = {}
    for index in sorted(packed["state"]):
        for name, value in sorted(packed["state"][index].items()):
            if isinstance(value, torch.Tensor):
                tensors.append(_copy(value))
                specs.append(_spec(f"{index}.{name}", value))
            else:
                statistics.setdefault(str(index), {})[name] = value
    scalars = Scalars(statistics, hyper_parameters_of(optimizer.param_groups), plain_part(scheduler_state))
    encoded = msgspec.msgpack.encode(scalars, order="sorted")
    return State(StateHeader(position, lineage_samples, specs, encoded, b"", origin), tensors)


def sealed(state: State) -> State:
    """The same state with its digest."""
    header = state.header
    digest = digest_of(header.tensors, header.scalars, state.tensors)
    return State(msgspec.structs.replace(header, digest=digest), state.tensors)


def without_origin(state: State) -> State:
    """The same state with unknown origin."""
    return replace(state, header=msgspec.structs.replace(state.header, origin=None))


def digest_of(specs: Sequence[ParameterSpec], scalars: bytes, tensors: Sequence[torch.Tensor]) -> bytes:
    """SHA-256 of a state's content, independent of its source."""
    sha256 = hashlib.sha256(msgspec.msgpack.encode([list(specs), scalars]))
    for tensor in tensors:
        sha256.update(as_bytes(tensor))
    return sha256.digest()


def checked_scalars(header: StateHeader, parameters: Sequence[ParameterSpec], num_groups: int) -> Scalars:
    """Check that a state fits an optimizer, before a byte of its tensors is received.

    Args:
        parameters: of the optimizer, in order.
        num_groups: its parameter groups.
    Raises:
        ValueError: it does not fit; says where.
    """
    for own, sent in zip(parameters, header.tensors, strict=False):
        if own.shape != sent.shape or own.dtype != sent.dtype:
            raise ValueError(f"its {own.name} is {sent.dtype} of shape {list(sent.shape)}, here it is "
                             f"{own.dtype} of shape {list(own.shape)}")  # fmt: skip
    if len(header.tensors) < len(parameters):
        raise ValueError(f"it has {len(header.tensors)} tensors, the model here has {len(parameters)}")
    counts: Counter[int] = Counter()
    for spec in header.tensors[len(parameters) :]:
        index = _owner_of(spec)
        counts[index] += 1
        if (
            not 0 <= index < len(parameters)
            or spec.dtype not in _DTYPES
            or len(spec.shape) > MAX_DIMENSIONS
            or any(size < 0 for size in spec.shape)
            or math.prod(size or 1 for size in spec.shape) > max(math.prod(parameters[index].shape), 1)
            or counts[index] > MAX_STATISTICS_PER_PARAMETER
        ):
            raise ValueError(f"its statistic {spec.name} ({spec.dtype} of shape {list(spec.shape)}) fits no parameter")
    try:
        scalars = msgspec.msgpack.decode(header.scalars, type=Scalars)
    except RecursionError as error:
        raise ValueError("its numbers are nested too deeply") from error
    if len(scalars.groups) != num_groups:
        raise ValueError(f"it has {len(scalars.groups)} parameter groups, the optimizer here has {num_groups}")
    if any(not _is_index(text, len(parameters)) for text in scalars.statistics):
        raise ValueError("it has statistics of a parameter that does not exist")
    return scalars


def restore(state: State, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Write a state into an optimizer and its parameters; returns the scheduler's state.

    Raises:
        ValueError: the state does not fit; nothing was changed.
    """
    parameters, own = parameters_of(optimizer), optimizer.state_dict()
    scalars = checked_scalars(state.header, specs_of(optimizer), len(own["param_groups"]))
    statistics = {int(index): values for index, values in scalars.statistics.items()}
    for spec, tensor in zip(state.header.tensors[len(parameters) :], state.tensors[len(parameters) :], strict=True):
        statistics.setdefault(_owner_of(spec), {})[spec.name.partition(".")[2]] = tensor.clone()
    groups = [
        {name: _merged_option(name, value, sent) for name, value in group.items()}
        for group, sent in zip(own["param_groups"], scalars.groups, strict=True)
    ]
    try:
        optimizer.load_state_dict({"state": statistics, "param_groups": groups})
    except _MISFITS as error:  # a statistic is missing or of another type
        optimizer.load_state_dict(own)
        raise ValueError(f"its statistics do not fit {type(optimizer).__name__} ({error!r})") from error
    with torch.no_grad():
        for parameter, tensor in zip(parameters, state.tensors, strict=False):
            parameter.copy_(tensor)
    return scalars.scheduler


def empty_tensors(specs: Sequence[ParameterSpec]) -> list[torch.Tensor]:
    """Memory to receive tensors into; the specs must have been checked."""
    return [torch.empty(spec.shape, dtype=_DTYPES[spec.dtype]) for spec in specs]


def itemsize_of(spec: ParameterSpec) -> int:
    """Bytes of one value of a checked tensor."""
    return _DTYPES[spec.dtype].itemsize


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype."""
    return bytes_of(tensor.reshape(-1).view(torch.uint8))


def _owner_of(spec: ParameterSpec) -> int:
    index, _, _ = spec.name.partition(".")
    return int(index)


def _is_index(text: str, num_parameters: int) -> bool:
    """Whether a text is the index of a parameter, as :func:`capture` writes it."""
    return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < num_parameters


def _spec(name: str, tensor: torch.Tensor) -> ParameterSpec:
    return ParameterSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _number(value: Any) -> Any:
    """A tensor's value as a number, as for a learning rate; other values unchanged."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _merged_option(name: str, own: Any, sent: dict[str, Any]) -> Any:
    if name == "params" or name in LOCAL_OPTIONS or name not in sent:
        return own
    value = merged(_number(own), sent[name])
    return torch.full_like(own, value) if isinstance(own, torch.Tensor) else value
