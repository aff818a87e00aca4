"""Checks the user's input to the optimizer: options, the wrapped optimizer, its parameters, and each batch."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyhands.averaging.state.content import DTYPES_OF_STATES
from manyhands.averaging.tensor_list import DTYPES, overlaps_itself
from manyhands.base.arguments import number_of, whole
from manyhands.base.errors import ConfigError
from manyhands.base.run_id import checked_run_id
from manyhands.base.text import counted
from manyhands.optim.state.state import hyper_parameters_of, names_of, parameters_of

Delay = Literal["optimizer", "gradients"]
DELAYS = ("optimizer", "gradients")
GroupOptions = list[dict[str, Any]]
"""The options of each parameter group that affect a step, such as the learning rate."""
_NOT_USED = {"initial_lr"}  # options that affect no step: torch's schedulers write this one when they are constructed
OptimizerMaker = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
SchedulerMaker = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The user's arguments that are numbers, names and flags, checked; see :class:`manyhands.Optimizer`.

    Attributes:
        num_fragments: of local steps; None without local steps.
    """

    run_id: str
    target_batch_size: int
    batch_size_per_step: int | None
    max_grad_norm: float | None
    delay: Delay | None
    offload: bool | None
    auxiliary: bool
    num_fragments: int | None = None

    def __post_init__(self) -> None:
        checked_run_id(self.run_id)
        for name, example in (("target_batch_size", 4096), ("batch_size_per_step", 32)):
            if (count := getattr(self, name)) is not None or name == "target_batch_size":
                object.__setattr__(self, name, whole(name, count, least=1, example=example))
        if self.max_grad_norm is not None and not 0 < number_of(self.max_grad_norm) < math.inf:
            raise ConfigError(f"max_grad_norm={self.max_grad_norm!r} must be above 0; for example 1.0, or None")
        if self.delay is not None and self.delay not in DELAYS:
            raise ConfigError(f"delay={self.delay!r} is unknown; one of {', '.join(map(repr, DELAYS))}, or None")
        if self.delay is not None and self.offload is False:
            raise ConfigError(
                f"delay={self.delay!r} needs a copy of the parameters to step on; leave offload out, or set it to True"
            )
        if self.num_fragments is not None:
            self._check_local()
        if self.auxiliary and self.batch_size_per_step is not None:
            raise ConfigError("an auxiliary peer has no batches: leave batch_size_per_step out")
        object.__setattr__(self, "offload", bool(self.offload) or self.delay is not None)

    def _check_local(self) -> None:
        target, num_fragments = self.target_batch_size, self.num_fragments or 1
        if self.delay is not None:
            raise ConfigError(
                f"delay={self.delay!r} is for synchronous steps; with local_steps write "
                "LocalSteps(overlap_steps=5) instead, which goes on training while the average is computed"
            )
        if target < num_fragments:
            raise ConfigError(
                f"target_batch_size={target} is below the number of fragments, {num_fragments}: each is averaged once "
                f"in the target; for example {100 * num_fragments}"
            )
        self.check_peers(1)

    def check_peers(self, num_peers: int, batch_size: int | None = None) -> None:
        """Raise ``ConfigError`` if the target is too small for local steps of so many peers.

        Args:
            batch_size: samples of one batch; by default ``batch_size_per_step``.
        """
        target = self.target_batch_size
        batch_size = batch_size or self.batch_size_per_step or 1
        if self.num_fragments is None or target >= num_peers * batch_size:
            return
        each = f" for each of the {num_peers} peers" if num_peers > 1 else ""
        smaller = f"batches of {target // num_peers} here, or " if target >= num_peers else ""
        raise ConfigError(
            f"target_batch_size={target} is below one batch of {counted(batch_size, 'sample')}{each}: local steps need "
            f"at least one of every peer between two averages; for example {smaller}a run with "
            f"target_batch_size={100 * num_peers * batch_size}"
        )

    def facts(self) -> dict[str, str]:
        """These settings as facts of the manifest, which must be equal on all peers of a run."""
        return {"max_grad_norm": str(float(self.max_grad_norm))} if self.max_grad_norm is not None else {}


def made_optimizer(optimizer: OptimizerMaker, params: Iterable[Any] | None) -> torch.optim.Optimizer:
    """The optimizer to wrap, as given or made of ``params``; raises ``ConfigError`` if it cannot be used."""
    if isinstance(optimizer, torch.optim.Optimizer):
        if params is not None:
            raise ConfigError("params are for a function that makes the optimizer; this one has parameters already")
        made = optimizer
    elif isinstance(optimizer, torch.nn.Module) or not callable(optimizer):
        raise ConfigError(
            f"optimizer is of type {type(optimizer).__name__}, and a torch optimizer over the model's parameters is "
            "needed; for example torch.optim.AdamW(model.parameters())"
        )
    elif params is None:
        raise ConfigError("the optimizer is to be made by a function: give params=model.parameters() as well")
    elif not isinstance(made := optimizer(params), torch.optim.Optimizer):
        raise ConfigError(f"the function that makes the optimizer returned {made!r}; have it return a torch optimizer")
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(made).__name__} computes the loss again within one step, with a closure; here a step is made with "
            "the gradient that all peers have averaged. Wrap an optimizer without one, such as torch.optim.AdamW"
        )
    return made


def made_scheduler(scheduler: SchedulerMaker | None, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """The schedule of the wrapped optimizer, as given or made for it; raises ``ConfigError`` if it cannot be used."""
    if scheduler is None:
        return None
    made: Any = scheduler(optimizer) if callable(scheduler) and not isinstance(scheduler, LRScheduler) else scheduler
    example = "scheduler=lambda inner: torch.optim.lr_scheduler.CosineAnnealingLR(inner, T_max=1000)"
    if not hasattr(made, "optimizer"):
        what = f"a function that returned {made!r}" if made is not scheduler else f"{made!r}"
        raise ConfigError(f"scheduler is {what}, and a torch scheduler is needed; for example {example}")
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau follows each peer's own loss; give a schedule by global step, LambdaLR say"
        )
    if made.optimizer is not optimizer:
        raise ConfigError(
            f"the scheduler, a {type(made).__name__}, changes the options of another optimizer than the wrapped one; "
            f"for example {example}"
        )
    return cast(LRScheduler, made)


def checked_batch(batch_size: int | None, weight: float | None) -> int:
    """The number of samples of one call of ``step``; raises ``ConfigError`` if an argument breaks its rule."""
    if batch_size is None:
        raise ConfigError(
            "step() needs to know how many samples are behind the gradients; "
            "give batch_size_per_step=32 to the optimizer, or batch_size=32 to step()"
        )
    if weight is not None and not 0 <= number_of(weight) < math.inf:
        raise ConfigError(f"weight={weight!r} must be at least 0, such as the tokens over which the loss is a mean")
    return whole("batch_size", batch_size, least=0, example=32)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a ``DTensor``, of which this process may hold a part only."""
    # by an attribute, as torch imports the class only when needed
    return hasattr(tensor, "device_mesh")


def checked_parameters(
    optimizer: torch.optim.Optimizer, *, may_be_sharded: bool = False
) -> list[tuple[str, torch.Tensor]]:
    """All parameters of an optimizer with their names; raises ``ConfigError`` if one cannot be trained in a run."""
    seen: set[int] = set()
    named = list(zip(names_of(optimizer), parameters_of(optimizer), strict=True))
    for name, parameter in named:
        if id(parameter) in seen:
            raise ConfigError(f"{name} is given to the optimizer twice; give each parameter once, as parameters() does")
        seen.add(id(parameter))
        _check(name, parameter, may_be_sharded=may_be_sharded)
    if not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError("no parameter of the optimizer requires grad, so there is nothing to train")
    return named


def _check(name: str, parameter: torch.Tensor, *, may_be_sharded: bool) -> None:
    if torch.nn.parameter.is_lazy(parameter):
        raise ConfigError(f"{name} has no shape yet; run a batch through the model before the Optimizer is made")
    is_ordinary = type(parameter).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not is_ordinary and not (may_be_sharded and is_sharded(parameter)):
        way_out = "; with FSDP2, make a manyhands.ProcessGroupOptimizer on all ranks" if is_sharded(parameter) else ""
        kind = type(parameter).__name__
        raise ConfigError(f"{name} is a {kind}; an ordinary tensor is needed, whole on this machine{way_out}")
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
        raise ConfigError(f"{name} is {parameter.dtype}; {what} parameters can be of {names}{way_out}")
    if overlaps_itself(parameter):
        raise ConfigError(f"several values of {name} share memory, as after expand(); give it a clone of that")


def check_frozen(frozen: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise ``ConfigError`` if a parameter that was frozen when the run was joined requires grad now.

    The run does not average it.
    """
    for name, parameter in frozen:
        if parameter.requires_grad:
            raise ConfigError(
                f"{name} was frozen when the Optimizer was made, so the run does not train it, and requires grad now; "
                "freeze it again, or on all peers make the Optimizer first, and freeze after that what is to be "
                "trained later"
            )


def options_of(groups: Sequence[Mapping[str, Any]]) -> GroupOptions:
    """A copy of the options of parameter groups that affect a step."""
    used = [{name: value for name, value in group.items() if name not in _NOT_USED} for group in groups]
    return hyper_parameters_of(used)


def check_unchanged(before: GroupOptions, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ConfigError`` if an option of the groups has changed, which only the run's schedule may do."""
    if len(groups) != len(before):
        raise ConfigError(
            f"there were {len(before)} parameter groups and are {len(groups)} now; give all groups to the wrapped "
            "optimizer at first"
        )
    for index, (options, group) in enumerate(zip(before, groups, strict=True)):
        for name, old in options.items():
            new = group.get(name, old)
            if isinstance(new, tuple):
                new = list(new)
            if type(new) is not type(old):  # ``old`` is a plain value; ``new`` may be a learning rate in a tensor, say
                new = options_of([{name: new}])[0].get(name, old)
            if new != old:
                where = f" of parameter group {index}" if len(before) > 1 else ""
                raise ConfigError(
                    f"the option {name!r}{where} was {old!r} and is {new!r} now: something other than scheduler= has "
                    "changed it. Peers call step() unequally often, so each would train with a value of its own. Give "
                    "the schedule to the optimizer, which steps it once for each global step on all peers, and call no "
                    "scheduler.step() in the loop:\n"
                    "    optimizer = manyhands.Optimizer(..., "
                    "scheduler=lambda inner: CosineAnnealingLR(inner, T_max=1000))\n"
                    "A transformers.Trainer makes a schedule of its own, but for this line before trainer.train():\n"
                    "    trainer.add_callback(manyhands.training.transformers.CollaborativeCallback(trainer))"
                )
