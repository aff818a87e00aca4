"""The options of the parameter groups, such as the learning rate: only the schedule of the run may change them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.base.errors import ConfigError
from manyhands.optim.state.state import hyper_parameters_of

Options = list[dict[str, Any]]

_NOT_USED = {"param_names", "initial_lr"}  # in a step; torch's schedulers write the latter when they are made


def options_of(groups: Sequence[Mapping[str, Any]]) -> Options:
    """What an optimizer steps with, copied."""
    used = [{name: value for name, value in group.items() if name not in _NOT_USED} for group in groups]
    return hyper_parameters_of(used)


def check_unchanged(before: Options, groups: Sequence[Mapping[str, Any]]) -> None:
    """Make sure that the groups have the options that they had.

    Raises:
        ConfigError: an option is another one; it says which, and what to write instead.
    """
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
            if type(new) is not type(old):  # a learning rate in a tensor, say
                new = options_of([{name: new}])[0].get(name, old)
            if new != old:
                raise ConfigError(_changed(name, index if len(before) > 1 else None, old, new))


def _changed(name: str, group: int | None, old: Any, new: Any) -> str:
    where = f" of parameter group {group}" if group is not None else ""
    return (
        f"the option {name!r}{where} was {old!r} and is {new!r} now: something other than scheduler= has changed it. "
        "Peers call step() unequally often, so each would train with a value of its own. Give the schedule to the "
        "optimizer, which steps it once for each global step on all peers, and call no scheduler.step() in the loop:\n"
        "    optimizer = manyhands.Optimizer(..., scheduler=lambda inner: CosineAnnealingLR(inner, T_max=1000))\n"
        "A transformers.Trainer makes a schedule of its own, but for this line before trainer.train():\n"
        "    trainer.add_callback(manyhands.training.transformers.CollaborativeCallback(trainer))"
    )
