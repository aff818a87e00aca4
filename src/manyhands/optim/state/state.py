"""The state of a run at one global step: which parts of an optimizer it has, and how it is captured and loaded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec
import torch

from manyhands.averaging.memory import bytes_of, whole_lines
from manyhands.averaging.messages import Position
from manyhands.averaging.roster import Roster
from manyhands.averaging.state.content import (
    DTYPE_NAMED,
    DTYPES_OF_STATES,
    Origin,
    State,
    StateHeader,
    empty_content,
    first_of,
    spec_of,
    state_of,
)
from manyhands.averaging.state.download import MAX_HEADER_BYTES
from manyhands.base.errors import ConfigError
from manyhands.base.parameter_spec import ParameterSpec, bare_names
from manyhands.base.structs import make_ready
from manyhands.optim.serializable import merged, serializable_part
from manyhands.optim.state.tree import decoded, encoded, with_tensors

COPIED_BYTES = 16 << 20
"""The number of bytes that are copied at a time, while a step has to wait."""
MAX_BYTES_PER_VALUE = 64
"""The largest size of all statistics together, per value of the parameters: sixteen float32 numbers."""
MORE_BYTES = 16 << 20
"""Bytes of statistics that are allowed beyond ``MAX_BYTES_PER_VALUE``, for small models: the matrices of
Shampoo, say, are large beside a bias."""
MAX_STATISTICS = 256
"""The largest number of tensors per parameter, on average: some optimizers have a few for each block of a matrix."""
MAX_DIMENSIONS = 32
INNER = "inner."
"""Prefix of the names of statistics of the inner optimizer, in a run with local steps."""
SHARED = "shared"
"""Takes the place of a parameter's index for values that an optimizer keeps for all parameters, under texts as keys."""
WHOLE = "$state"
"""Key under which all statistics of a parameter are together, as encoded by :mod:`manyhands.optim.state.tree`. The
place of a tensor is its number among the statistics of the optimizer."""
TRAIN_MODE = "train_mode"
"""Option of schedule-free optimizers: whether the parameters are those to train on, or those to evaluate."""
LOCAL_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable", "param_names"})
"""Options that are not part of the state, and may differ between peers: they say how an optimizer computes on its
machine, and how its parameters are called there."""

_MISFITS = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)
"""Exceptions that optimizers raise when they load the statistics of another kind of optimizer."""


class Scalars(msgspec.Struct, omit_defaults=True):
    """The part of a state that is not in tensors.

    Attributes:
        statistics: of the optimizer, by index of the parameter as decimal text, or ``SHARED``.
        groups: the hyper-parameters of each parameter group.
        scheduler: the state of the schedule.
        inner_statistics: the same of the donor's inner optimizer, in a run with local steps.
        inner_groups: likewise.
    """

    statistics: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    scheduler: dict[str, Any]
    inner_statistics: dict[str, dict[str, Any]] = {}
    inner_groups: list[dict[str, Any]] = []


make_ready(Scalars)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def names_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of all parameters, without the prefixes of wrappers; ``parameter 0`` and so on if they have none."""
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
    """The options of each parameter group, except the local ones, as plain values."""
    return [
        {name: serializable_part(_number(group[name])) for name in group if name not in {"params", *LOCAL_OPTIONS}}
        for group in groups
    ]


class Capture:
    """Copies the state of a run piece by piece. Nothing may change the state while this object is constructed.

    Args:
        optimizer: makes the global steps.
        extra: the tensors beside the parameters, with their specs.
        inner: the inner optimizer, in a run with local steps.
        position, lineage_samples, origin, ancestry, roster, seal: as in :class:`.Replica`.
    Raises:
        ConfigError: newcomers could not load the state; names the value.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler_state: dict[str, Any],
        position: Position,
        lineage_samples: int,
        origin: Origin | None = None,
        extra: Sequence[tuple[ParameterSpec, torch.Tensor]] = (),
        inner: torch.optim.Optimizer | None = None,
        ancestry: bytes = b"",
        roster: Roster | None = None,
        seal: bytes = b"",
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
        plain = msgspec.msgpack.encode(scalars, order="sorted")
        self._header = StateHeader(
            position, lineage_samples, specs, plain, b"", origin, ancestry, roster or Roster(), seal
        )
        if fault := _fault_of_size(specs[len(parameters) + len(extra) :], specs[: len(parameters)]):
            raise ConfigError(f"a newcomer would refuse the state of this optimizer: {fault}")
        if (num_bytes := len(msgspec.msgpack.encode(self._header))) > MAX_HEADER_BYTES:
            raise ConfigError(
                f"a newcomer would refuse the state of this optimizer: what is not in its tensors takes {num_bytes} "
                f"bytes, and at most {MAX_HEADER_BYTES} are accepted; keep long lists of numbers in a tensor"
            )

    def _add_statistics(
        self, optimizer: torch.optim.Optimizer, prefix: str, specs: list[ParameterSpec]
    ) -> dict[str, dict[str, Any]]:
        """Add the tensors among an optimizer's statistics to the content and to ``specs``; returns the other values.

        Args:
            prefix: of the names of the statistics.
        """
        first = len(specs)
        places = dict[int, int]()  # by id of the tensor
        others = dict[str, dict[str, Any]]()

        def place_of(name: str, tensor: torch.Tensor) -> int:
            if id(tensor) not in places:
                _check_statistic(name, tensor)
                owner, _, inside = name.partition(".")
                places[id(tensor)] = len(specs) - first
                self._sources.append(tensor.detach())
                specs.append(spec_of(f"{owner}.{prefix}{inside}", tensor))
            return places[id(tensor)]

        for owner, values in _statistics_of(optimizer).items():
            tensors = _plain_tensors(values)
            if tensors is None or not places.keys().isdisjoint(map(id, tensors.values())):
                others[owner] = {WHOLE: encoded(values, owner, place_of, sorts=True)}
                continue
            for name, tensor in sorted(tensors.items()):
                place_of(f"{owner}.{name}", tensor)
            if rest := {name: value for name, value in values.items() if name not in tensors}:
                others[owner] = rest
        return others

    def copy(
        self, guard: Callable[[], AbstractContextManager[Any]] = nullcontext, is_moved: Callable[[], bool] = bool
    ) -> State | None:
        """Copy all tensors, without their digests; None if the state has changed meanwhile.

        Args:
            guard: makes the context in which each piece is copied, which takes a few milliseconds.
            is_moved: returns whether the state has changed since this object was constructed; called in that context.
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
    """Split a state into that without the donor's inner optimizer, and that of the inner optimizer, if it has one.

    Args:
        state: its header must be checked.
        inner: the parameters of this peer's inner optimizer; they may be less precise than those of the state.
        num_extra: number of tensors beside the parameters.
    """
    num_parameters = len(inner)
    specs = state.header.tensors
    scalars = msgspec.msgpack.decode(state.header.scalars, type=Scalars)
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
    plain = msgspec.msgpack.encode(scalars, order="sorted")
    return replace(state, header=msgspec.structs.replace(state.header, scalars=plain))


def checked_scalars(
    header: StateHeader, parameters: Sequence[ParameterSpec], num_groups: int, extra: Sequence[ParameterSpec] = ()
) -> Scalars:
    """Check that a state fits an optimizer, by its header alone; returns the part of it that is not in tensors.

    Args:
        parameters: of the optimizer, in order.
        num_groups: number of parameter groups of the optimizer.
        extra: the tensors beside the parameters.
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
    statistics = header.tensors[len(due) :]
    for spec in statistics:
        if (
            not _is_owner(statistic_of(spec)[0], len(parameters))
            or spec.dtype not in DTYPE_NAMED
            or len(spec.shape) > MAX_DIMENSIONS
            or any(size < 0 for size in spec.shape)
        ):
            raise ValueError(f"its statistic {spec.name} ({spec.dtype} of shape {list(spec.shape)}) fits no parameter")
    if fault := _fault_of_size(statistics, parameters):
        raise ValueError(fault)
    try:
        scalars = msgspec.msgpack.decode(header.scalars, type=Scalars)
    except RecursionError as error:
        raise ValueError("its numbers are nested too deeply") from error
    if len(scalars.groups) != num_groups:
        raise ValueError(f"it has {len(scalars.groups)} parameter groups, the optimizer here has {num_groups}")
    if any(not _is_owner(text, len(parameters)) for text in [*scalars.statistics, *scalars.inner_statistics]):
        raise ValueError("it has statistics of a parameter that does not exist")
    return scalars


def restore(state: State, optimizer: torch.optim.Optimizer, extra: Sequence[ParameterSpec] = ()) -> dict[str, Any]:
    """Write a state into an optimizer and its parameters, but not into the extra tensors; returns the schedule's state.

    Raises:
        ValueError: the state does not fit; nothing was changed.
    """
    parameters, own = parameters_of(optimizer), optimizer.state_dict()
    scalars = checked_scalars(state.header, specs_of(optimizer), len(own["param_groups"]), extra)
    packed: dict[int | str, Any] = {}
    for owner, values in statistics_in(state, scalars, len(parameters) + len(extra), are_copied=True).items():
        if owner != SHARED:
            packed[int(owner)] = values
        elif isinstance(values, dict):
            packed.update({f"{key}": value for key, value in values.items()})
    groups = [
        {name: _merged_option(name, value, sent) for name, value in group.items()}
        for group, sent in zip(own["param_groups"], scalars.groups, strict=True)
    ]
    try:
        load_packed(optimizer, {"state": packed, "param_groups": groups})
    except _MISFITS as error:  # a statistic is missing or of another type
        load_packed(optimizer, own)
        raise ValueError(f"its statistics do not fit {type(optimizer).__name__} ({error!r})") from error
    with torch.no_grad():
        for parameter, tensor in zip(parameters, state.tensors, strict=False):
            parameter.copy_(tensor)
    try:
        _set_mode(optimizer, own["param_groups"])
    except _MISFITS as error:
        raise ValueError(f"its statistics do not fit {type(optimizer).__name__} ({error!r})") from error
    return scalars.scheduler


def statistics_in(state: State, scalars: Scalars, first: int, *, are_copied: bool = False) -> dict[str, Any]:
    """The statistics in a state, by index of the parameter as decimal text, or ``SHARED``.

    Args:
        first: index of the first tensor that is a statistic.
        are_copied: return copies of the tensors.
    Raises:
        ValueError: they cannot be those of an optimizer.
    """
    specs = state.header.tensors[first:]
    tensors = state.tensors[first:]
    copies = dict[int, torch.Tensor]()

    def tensor_at(place: Any) -> torch.Tensor:
        if type(place) is not int or not 0 <= place < len(tensors):
            raise ValueError(f"it has no tensor {place!r}")
        if place not in copies:
            copies[place] = tensors[place].clone() if are_copied else tensors[place]
        return copies[place]

    found: dict[str, Any] = {}
    for owner, values in scalars.statistics.items():
        found[owner] = decoded(values[WHOLE], tensor_at) if WHOLE in values else dict(values)
    for place, spec in enumerate(specs):
        owner, name = statistic_of(spec)
        if WHOLE not in scalars.statistics.get(owner, {}):
            found.setdefault(owner, {})[name] = tensor_at(place)
    return found


def load_packed(optimizer: torch.optim.Optimizer, packed: Mapping[str, Any]) -> None:
    """Load a result of ``state_dict()`` into an optimizer, with the dtype and the kind of each statistic as it was.

    ``load_state_dict`` alone gives all floating-point statistics the dtype of their parameter, even those that the
    optimizer keeps in another dtype. It also makes integers floating-point numbers, and loses texts.
    """
    optimizer.load_state_dict(dict(packed))
    parameters = parameters_of(optimizer)
    ids = chain.from_iterable(group["params"] for group in packed["param_groups"])
    owners: dict[Any, Any] = dict(zip(ids, parameters, strict=True))

    def beside_parameters(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(parameters[0].device) if tensor.dim() else tensor

    for key, sent in packed["state"].items():
        owner = owners.get(key, key)
        if owner not in optimizer.state:
            continue
        if isinstance(owner, torch.Tensor):
            optimizer.state[owner] = _as_it_was(optimizer.state[owner], sent)
        else:
            optimizer.state[owner] = with_tensors(sent, beside_parameters)


def _as_it_was(loaded: Any, sent: Any) -> Any:
    """A loaded statistic with the dtypes that were sent, where the optimizer has not changed its shape or kind."""
    if isinstance(loaded, torch.Tensor) and isinstance(sent, torch.Tensor):
        has_other_dtype = loaded.dtype != sent.dtype and loaded.shape == sent.shape
        return sent.to(loaded.device) if has_other_dtype else loaded
    if isinstance(loaded, dict) and isinstance(sent, dict):
        for key in loaded.keys() & sent.keys():
            if key != "step":  # load_state_dict keeps the dtype of this one as torch needs it
                loaded[key] = _as_it_was(loaded[key], sent[key])
    elif isinstance(loaded, (list, tuple)) and type(loaded) is type(sent) and len(loaded) == len(sent):
        items = [_as_it_was(item, its_sent) for item, its_sent in zip(loaded, sent, strict=True)]
        return items if isinstance(loaded, list) else tuple(items)
    return sent if isinstance(sent, str) else loaded


def _set_mode(optimizer: Any, before: Sequence[Mapping[str, Any]]) -> None:
    """Bring a schedule-free optimizer back to the mode that it was in: the donor's state may be of the other mode.

    Args:
        before: the parameter groups before the state was loaded.
    """
    modes = [group[TRAIN_MODE] for group in before if isinstance(group.get(TRAIN_MODE), bool)]
    if modes and any(group.get(TRAIN_MODE) is not modes[0] for group in optimizer.param_groups):
        if modes[0]:
            optimizer.train()
        else:
            optimizer.eval()


def take_options(state: State, optimizer: torch.optim.Optimizer) -> None:
    """Write the options of a state's groups, such as the learning rate, into an optimizer.

    The caller must have checked them.
    """
    scalars = msgspec.msgpack.decode(state.header.scalars, type=Scalars)
    for group, sent in zip(optimizer.param_groups, scalars.groups, strict=True):
        group.update({name: _merged_option(name, value, sent) for name, value in group.items()})


def statistic_of(spec: ParameterSpec) -> tuple[str, str]:
    """The owner of a statistic, which is the index of its parameter or ``SHARED``, and the statistic's name."""
    owner, _, name = spec.name.partition(".")
    return owner, name


def _statistics_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All statistics of an optimizer: by index of the parameter, in order, and after them those under ``SHARED``."""
    for key in optimizer.state:
        if not isinstance(key, (torch.Tensor, str)):
            raise ConfigError(
                f"the optimizer's state has a value under {key!r}, and its keys must be parameters or texts: a "
                "checkpoint would confuse it with a parameter"
            )
    packed = optimizer.state_dict()["state"]
    found = {f"{key}": packed[key] for key in sorted(key for key in packed if not isinstance(key, str))}
    shared = {key: packed[key] for key in sorted(key for key in packed if isinstance(key, str))}
    return found | ({SHARED: shared} if shared else {})


def _plain_tensors(values: Any) -> dict[str, torch.Tensor] | None:
    """The tensors among a parameter's statistics; None unless all of these are tensors or numbers under texts."""
    if not isinstance(values, dict) or not all(type(name) is str and not name.startswith("$") for name in values):
        return None
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    others = [value for name, value in values.items() if name not in tensors]
    are_plain = all(value is None or type(value) in (bool, float) or _is_short(value) for value in others)
    return tensors if are_plain and len(set(map(id, tensors.values()))) == len(tensors) else None


def _is_short(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _check_statistic(name: str, tensor: torch.Tensor) -> None:
    # a subclass with a dispatch of its own, such as DTensor, keeps its values elsewhere
    is_ordinary = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not is_ordinary or tensor.dtype not in DTYPES_OF_STATES or tensor.layout != torch.strided or tensor.is_meta:
        kind = f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout} on {tensor.device}"
        raise ConfigError(
            f"{name} in the optimizer's state is a {kind}, which cannot be sent to a newcomer; an optimizer with "
            "ordinary tensors of floating-point numbers, integers or bool is needed"
        )


def _fault_of_size(statistics: Sequence[ParameterSpec], parameters: Sequence[ParameterSpec]) -> str:
    """Why statistics are too many or too large for a model; empty if they are not."""
    if len(statistics) > (most := MAX_STATISTICS * (1 + len(parameters))):
        return f"it has {len(statistics)} statistics, and at most {most} are accepted for {len(parameters)} parameters"
    num_values = sum(math.prod(spec.shape) for spec in parameters)
    most = MAX_BYTES_PER_VALUE * num_values + MORE_BYTES
    sizes = [math.prod(size or 1 for size in spec.shape) * DTYPE_NAMED[spec.dtype].itemsize for spec in statistics]
    if (num_bytes := sum(map(whole_lines, sizes))) <= most:
        return ""
    largest = statistics[sizes.index(max(sizes))]
    return (
        f"its {len(statistics)} statistics take {num_bytes} bytes, and at most {most} are accepted for a model of "
        f"{num_values} values; the largest is {largest.name}, {largest.dtype} of shape {list(largest.shape)}"
    )


def _is_owner(text: str, num_parameters: int) -> bool:
    """Whether a text is ``SHARED``, or the index of a parameter, as :class:`Capture` writes it."""
    return text == SHARED or (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < num_parameters)


def _pieces(source: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a tensor that each take a few milliseconds to copy, with the parts of the target for them."""
    if not source.is_contiguous():
        yield source, target
        return
    step = COPIED_BYTES // source.itemsize
    flat, flat_target = source.view(-1), target.view(-1)
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step], flat_target[start : start + step]


def _number(value: Any) -> Any:
    """The number in a tensor of one value, or in a scalar of NumPy, as of a learning rate; else the value itself."""
    is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1
    is_numpy = type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
    return value.item() if is_tensor or is_numpy else value


def _merged_option(name: str, own: Any, sent: dict[str, Any]) -> Any:
    if name == "params" or name in LOCAL_OPTIONS or name not in sent:
        return own
    value = merged(_number(own), sent[name])
    return torch.full_like(own, value) if isinstance(own, torch.Tensor) else value
