"""The *rest* of a model: its parameters that the optimizer does not have, such as the frozen base of an adapter.

Peers do not send each other the rest, so all of them need the same one. If the user gives the model, the digest of the
rest is in the manifest of the run. Buffers are left out: those of BatchNorm change with each batch, and ``buffers=``
shares them; others follow from the model's class.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch
from blake3 import blake3

from manyhands.averaging.memory import bytes_of
from manyhands.averaging.state.content import spec_of
from manyhands.base.errors import ConfigError
from manyhands.base.parameter_spec import bare_names
from manyhands.base.text import counted
from manyhands.optim.manifest import REST_OF_MODEL

logger = logging.getLogger(__name__)

HASHED_BYTES = 64 << 20  # copied to the host at a time: a whole model may be too large for it
SHOWN_NAMES = 3
Named = tuple[str, torch.Tensor]


def facts_of_rest(model: torch.nn.Module | None, parameters: Iterable[torch.Tensor]) -> dict[str, str]:
    """The digest of a model's rest as a fact for the manifest; empty if there is no rest, or if the model is None.

    Reads all values of the rest once, about as fast as a copy would.

    Args:
        parameters: those of the optimizer.
    Raises:
        ConfigError: the model has none of these parameters.
    """
    if model is None:
        return {}
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model is of type {type(model).__name__}; give the torch.nn.Module that is trained")
    held = set(map(id, parameters))
    if held.isdisjoint(map(id, model.parameters())):
        raise ConfigError(
            f"model, a {type(model).__name__}, has none of the optimizer's parameters; make the optimizer of "
            "model.parameters(), or give the model that it trains"
        )
    rest = rest_of(model, held)
    return {REST_OF_MODEL: f"{counted(len(rest), 'tensor')} of digest {digest_of(rest)[:16]}"} if rest else {}


def rest_of(model: torch.nn.Module, held: set[int]) -> list[Named]:
    """The parameters of a model other than those with these ids, by name, without the prefixes of wrappers."""
    pairs = list(model.named_parameters())
    names = bare_names(name for name, _ in pairs)
    named = [(name, one) for name, (_, one) in zip(names, pairs, strict=True) if id(one) not in held]
    return sorted(named, key=lambda pair: pair[0])


def digest_of(named: Sequence[Named]) -> str:
    """BLAKE3 of names, shapes, dtypes and values; without the values of tensors that are not ordinary dense ones."""
    specs = [spec_of(name, parameter) for name, parameter in named]
    hasher = blake3(msgspec.msgpack.encode(specs))
    for _, parameter in named:
        for piece in _pieces(parameter.detach()):
            hasher.update(piece)
    return hasher.hexdigest()


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    is_here = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not tensor.is_meta
    if is_here and tensor.layout == torch.strided and tensor.numel():
        for piece in torch.split(tensor.reshape(-1), HASHED_BYTES // tensor.itemsize):
            yield bytes_of(piece.cpu().contiguous().view(torch.uint8))


def warn_of_rest(models: Iterable[torch.nn.Module], parameters: Iterable[torch.Tensor]) -> None:
    """Warn if these models have a rest, which the run does not compare as no model was given to the optimizer."""
    held = set(map(id, parameters))
    names = [name for model in models for name, _ in rest_of(model, held)]
    if names:
        shown = ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
        logger.warning(
            "The model has %s that the optimizer does not have (%s). The run neither sends nor compares them, so peers "
            "with other values would train together. Write on all peers\n    manyhands.Optimizer(..., model=model)",
            counted(len(names), "parameter"),
            shown,
        )
