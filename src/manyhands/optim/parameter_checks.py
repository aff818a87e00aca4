"""Which parameters a run can train, and that they stay the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from manyhands.averaging.tensor_list import DTYPES, overlaps_itself
from manyhands.base.errors import ConfigError
from manyhands.optim.state.state import DTYPES_OF_STATES, names_of, parameters_of


def checked_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """All parameters of an optimizer with their names, if they can be trained with others, or handed to a newcomer.

    Raises:
        ConfigError: one of them cannot, or there is nothing to train; it names the parameter and says why.
    """
    seen: set[int] = set()
    named = list(zip(names_of(optimizer), parameters_of(optimizer), strict=True))
    for name, parameter in named:
        if id(parameter) in seen:
            raise ConfigError(f"{name} is given to the optimizer twice; give each parameter once, as parameters() does")
        seen.add(id(parameter))
        _check(name, parameter)
    if not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError("no parameter of the optimizer requires grad, so there is nothing to train")
    return named


def _check(name: str, parameter: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(parameter):
        raise ConfigError(f"{name} has no shape yet; run a batch through the model before the Optimizer is made")
    if _is_no_plain_tensor(parameter):
        is_sharded = hasattr(parameter, "device_mesh")
        way_out = "; FSDP and tensor parallel are not supported, DistributedDataParallel is" if is_sharded else ""
        kind = type(parameter).__name__
        raise ConfigError(f"{name} is a {kind}; an ordinary tensor is needed, all of it here{way_out}")
    if parameter.layout != torch.strided:
        raise ConfigError(f"{name} is {parameter.layout}; a dense one is needed (its gradients may be sparse)")
    if parameter.device.type == "meta":
        raise ConfigError(f"{name} is on the meta device; give it memory and values before the Optimizer is made")
    if parameter.is_inference():
        raise ConfigError(f"{name} was made in inference mode and cannot be written; make the model outside of that")
    dtypes = DTYPES if parameter.requires_grad else DTYPES_OF_STATES
    if parameter.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        what, way_out = ("trained", "") if parameter.requires_grad else ("frozen", "; or leave it out of the optimizer")
        raise ConfigError(f"{name} is {parameter.dtype}; what is {what} can be of {names}{way_out}")
    if overlaps_itself(parameter):
        raise ConfigError(f"several values of {name} share memory, as after expand(); give it a clone of that")


def _is_no_plain_tensor(parameter: torch.Tensor) -> bool:
    """Whether its values are elsewhere, or mean something else, as those of a DTensor."""
    return type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


class FrozenParameters:
    """Those that did not require grad when the run was joined: it does not average them, and never changes them.

    One that is frozen later is like one that some batches do not use, and may be trained again.

    Args:
        named: all parameters, with their names.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._named = [(name, parameter) for name, parameter in named if not parameter.requires_grad]

    def check(self) -> None:
        """Make sure that they are frozen still.

        Raises:
            ConfigError: one is not; it names the parameter.
        """
        for name, parameter in self._named:
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen when the Optimizer was made, so the run does not train it, and requires grad "
                    "now; freeze it again, or on all peers make the Optimizer first, and freeze after that what is "
                    "to be trained later"
                )
