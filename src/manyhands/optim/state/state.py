"""The state of a run at one global step: what of an optimizer is in it, and how it gets out and in again."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import msgspec
import torch

from manyhands.averaging.memory import bytes_of
from manyhands.averaging.messages import Position
from manyhands.averaging.state.content import (
    DTYPE_NAMED,
    Origin,
    State,
    StateHeader,
    empty_content,
    first_of,
    spec_of,
    state_of,
)
from manyhands.base.parameter_spec import ParameterSpec, bare_names
from manyhands.base.structs import make_ready
from manyhands.optim.serializable import merged, serializable_part

COPIED_BYTES = 16 << 20  # at a time, while a step has to wait
MAX_STATISTICS_PER_PARAMETER = 8
MAX_DIMENSIONS = 32
INNER = "inner."
LOCAL_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable", "param_names"})
"""How an optimizer computes on this machine, not what, and how the parameters are called there: not part of the state,
and may differ between peers."""

_MISFITS = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)  # of another kind's statistics


class Scalars(msgspec.Struct, omit_defaults=True):
    """The part of a state that is not in tensors."""

    statistics: dict[str, dict[str, Any]]  # of the optimizer, by index of the parameter, as a decimal number
    groups: list[dict[str, Any]]  # the hyper-parameters of each parameter group
    scheduler: dict[str, Any]
    inner_statistics: dict[str, dict[str, Any]] = {}  # of the donor's inner optimizer, in a run with local steps
    inner_groups: list[dict[str, Any]] = []


make_ready(Scalars)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def names_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of all parameters, without those of wrappers; numbers if they have no names."""
    names = [name for group in optimizer.param_groups for name in group.get("param_names", [])]
    num_parameters = len(parameters_of(optimizer))
    if len(names) != num_parameters:
        return [f"parameter {index}" for index in range(num_parameters)]
    return bare_names(names)


def specs_of(optimizer: torch.optim.Optimizer) -> list[ParameterSpec]:
    """Name, shape and dtype of all parameters."""
    named = zip(names_of(optimizer), parameters_of(optimizer), strict=True)
    return [spec_of(name, parameter) for name, parameter in named]


def digest_of_parameters(optimizer: torch.optim.Optimizer) -> bytes:
    """SHA-256 of all parameters with their names, shapes and dtypes."""
    sha256 = hashlib.sha256(msgspec.msgpack.encode([specs_of(optimizer), b""]))
    for parameter in parameters_of(optimizer):
        sha256.update(bytes_of(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)))
    return sha256.digest()


def hyper_parameters_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The part of each parameter group that is sent."""
    return [
        {name: serializable_part(_number(group[name])) for name in group if name not in {"params", *LOCAL_OPTIONS}}
        for group in groups
    ]


class Capture:
    """Copies the state of a run piece by piece. Nothing may change the state while this is made."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler_state: dict[str, Any],
        position: Position,
        lineage_samples: int,
        origin: Origin | None = None,
        extra: Sequence[tuple[ParameterSpec, torch.Tensor]] = (),
        inner: torch.optim.Optimizer | None = None,
    ) -> None:
        parameters = parameters_of(optimizer)
        self._sources = [parameter.detach() for parameter in parameters] + [tensor for _, tensor in extra]
        specs = [spec_of(f"{index}", parameter) for index, parameter in enumerate(parameters)]
        specs += [spec for spec, _ in extra]
        statistics = self._add_statistics(optimizer, "", specs)
        scalars = Scalars(statistics, hyper_parameters_of(optimizer.param_groups), serializable_part(scheduler_state))
        if inner is not None:
            scalars.inner_statistics = self._add_statistics(inner, INNER, specs)
            scalars.inner_groups = hyper_parameters_of(inner.param_groups)
        encoded = msgspec.msgpack.encode(scalars, order="sorted")
        self._header = StateHeader(position, lineage_samples, specs, encoded, b"", origin)

    def _add_statistics(
        self, optimizer: torch.optim.Optimizer, prefix: str, specs: list[ParameterSpec]
    ) -> dict[str, dict[str, Any]]:
        """Add the tensors among an optimizer's statistics; returns the others."""
        packed, others = optimizer.state_dict(), dict[str, dict[str, Any]]()
        for index in sorted(packed["state"]):
            for name, value in sorted(packed["state"][index].items()):
                if isinstance(value, torch.Tensor):
                    self._sources.append(value.detach())
                    specs.append(spec_of(f"{index}.{prefix}{name}", value))
                else:
                    others.setdefault(str(index), {})[name] = value
        return others

    def copy(
        self, guard: Callable[[], AbstractContextManager[Any]] = nullcontext, is_moved: Callable[[], bool] = bool
    ) -> State | None:
        """Copy all tensors, without their digests; None if the state changed meanwhile.

        Args:
            guard: entered for each piece of a few milliseconds.
            is_moved: whether the state has changed since this was made; asked under the guard.
        """
        state = State(self._header, empty_content(self._header.tensors))
        for source, target in zip(self._sources, state.tensors, strict=True):
            for from_, to in _pieces(source, target):
                with guard():
                    if is_moved():
                        return None
                    to.copy_(from_)
        return state


def split_inner(state: State, inner: Sequence[ParameterSpec], num_extra: int) -> tuple[State, State | None]:
    """The state without the donor's inner optimizer, and a copy of that, if there is one, as a state of its own.

    The header must be checked. ``inner`` are the parameters of this peer's inner optimizer; they may be less precise.
    """
    num_parameters = len(inner)
    specs, scalars = state.header.tensors, msgspec.msgpack.decode(state.header.scalars, type=Scalars)
    first = num_parameters + num_extra
    num_outer = first + sum(not statistic_of(spec)[1].startswith(INNER) for spec in specs[first:])
    outer = _with_scalars(first_of(state, num_outer), Scalars(scalars.statistics, scalars.groups, scalars.scheduler))
    if not scalars.inner_groups:
        return outer, None
    renamed = [msgspec.structs.replace(spec, name=spec.name.replace(INNER, "", 1)) for spec in specs[num_outer:]]
    pairs = zip(specs[:num_parameters], inner, strict=True)
    parameters = [msgspec.structs.replace(sent, dtype=own.dtype) for sent, own in pairs]
    header = msgspec.structs.replace(state.header, tensors=[*parameters, *renamed])
    of_inner = state_of(header, [*state.tensors[:num_parameters], *state.tensors[num_outer:]])
    return outer, _with_scalars(of_inner, Scalars(scalars.inner_statistics, scalars.inner_groups, {}))


def _with_scalars(state: State, scalars: Scalars) -> State:
    encoded = msgspec.msgpack.encode(scalars, order="sorted")
    return replace(state, header=msgspec.structs.replace(state.header, scalars=encoded))


def checked_scalars(
    header: StateHeader, parameters: Sequence[ParameterSpec], num_groups: int, extra: Sequence[ParameterSpec] = ()
) -> Scalars:
    """Check that a state fits an optimizer, before a byte of its tensors is received.

    Args:
        parameters: of the optimizer, in order.
        extra: tensors beside the parameters.
    Raises:
        ValueError: it does not fit; says where.
    """
    due = [*parameters, *extra]
    for own, sent in zip(due, header.tensors, strict=False):
        if own.shape != sent.shape or own.dtype != sent.dtype:
            raise ValueError(f"its {own.name} is {sent.dtype} of shape {list(sent.shape)}, here it is "
                             f"{own.dtype} of shape {list(own.shape)}")  # fmt: skip
    if len(header.tensors) < len(due):
        raise ValueError(f"it has {len(header.tensors)} tensors, the model here has {len(due)}")
    counts: Counter[int] = Counter()
    for spec in header.tensors[len(due) :]:
        index, _ = statistic_of(spec)
        counts[index] += 1
        if (
            not 0 <= index < len(parameters)
            or spec.dtype not in DTYPE_NAMED
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
    if any(not _is_index(text, len(parameters)) for text in [*scalars.statistics, *scalars.inner_statistics]):
        raise ValueError("it has statistics of a parameter that does not exist")
    return scalars


def restore(state: State, optimizer: torch.optim.Optimizer, extra: Sequence[ParameterSpec] = ()) -> dict[str, Any]:
    """Write a state into an optimizer and its parameters, not the extra tensors; returns the scheduler's state.

    Raises:
        ValueError: the state does not fit; nothing was changed.
    """
    parameters, own = parameters_of(optimizer), optimizer.state_dict()
    scalars = checked_scalars(state.header, specs_of(optimizer), len(own["param_groups"]), extra)
    first = len(parameters) + len(extra)
    statistics = {int(index): values for index, values in scalars.statistics.items()}
    for spec, tensor in zip(state.header.tensors[first:], state.tensors[first:], strict=True):
        index, name = statistic_of(spec)
        statistics.setdefault(index, {})[name] = tensor.clone()
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


def take_options(state: State, optimizer: torch.optim.Optimizer) -> None:
    """Write the options of a state's groups, such as the learning rate, into an optimizer; they must be checked."""
    scalars = msgspec.msgpack.decode(state.header.scalars, type=Scalars)
    for group, sent in zip(optimizer.param_groups, scalars.groups, strict=True):
        group.update({name: _merged_option(name, value, sent) for name, value in group.items()})


def statistic_of(spec: ParameterSpec) -> tuple[int, str]:
    """The index of the parameter that a statistic belongs to, and its name."""
    index, _, name = spec.name.partition(".")
    return int(index), name


def _is_index(text: str, num_parameters: int) -> bool:
    """Whether a text is the index of a parameter, as :class:`Capture` writes it."""
    return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < num_parameters


def _pieces(source: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a tensor that each take a few milliseconds to copy, with their places in the target."""
    if not source.is_contiguous():
        yield source, target
        return
    step = COPIED_BYTES // source.itemsize
    flat, flat_target = source.view(-1), target.view(-1)
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step], flat_target[start : start + step]


def _number(value: Any) -> Any:
    """A tensor's value as a number, as for a learning rate; other values unchanged."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _merged_option(name: str, own: Any, sent: dict[str, Any]) -> Any:
    if name == "params" or name in LOCAL_OPTIONS or name not in sent:
        return own
    value = merged(_number(own), sent[name])
    return torch.full_like(own, value) if isinstance(own, torch.Tensor) else value
