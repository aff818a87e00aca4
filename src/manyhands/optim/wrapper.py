"""Makes an optimizer that wraps another one look like any torch optimizer."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from manyhands.base.errors import ConfigError
from manyhands.base.from_hivemind import FromHivemind
from manyhands.optim.step.replica import Replica

PLACE = "manyhands"
"""Key, in a checkpoint, of what :meth:`.Replica.place` returns: the position in the run, and more."""
PARTS = ("state", "param_groups")
"""The keys that the state of any torch optimizer has."""
PLACE_PARTS = ("step", "lineage", "lineage_samples", "ancestry", "roster", "seal", "scheduler")
"""The keys that each value under ``PLACE`` has."""


def check_accumulation(num_batches: int, *, makes_local_steps: bool) -> None:
    """Raise ``ConfigError`` if a library accumulates the gradients of several batches in a run with local steps."""
    if makes_local_steps and num_batches != 1:
        raise ConfigError(
            f"gradient_accumulation_steps={num_batches} does not work with local_steps, where each batch is a step of "
            f"this peer alone: leave it out, and make the batches {num_batches} times as large"
        )


class OptimizerWrapper(FromHivemind, torch.optim.Optimizer):
    """Has the groups and the state of another optimizer as its own.

    If that works on copies of the parameters on the host, the groups here still have the model's parameters, for
    ``zero_grad`` and gradient scalers.

    Attributes:
        inner: the wrapped optimizer.
        scheduler: its schedule, which moves with each global step; None without one.
    """

    _instead_of_a_copy = "state_dict() has its state, and copy.deepcopy(model) keeps the parameters"

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        if isinstance(inner, OptimizerWrapper) or isinstance(getattr(inner, "optimizer", None), OptimizerWrapper):
            raise ConfigError(
                "optimizer is a manyhands.Optimizer already, and cannot be wrapped again; close() it, and give "
                "optimizer.inner, the torch optimizer that it wraps"
            )
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._next_batch: tuple[int, float | None] | None = None

    if not TYPE_CHECKING:  # otherwise a type checker would accept misspelt names

        def __getattr__(self, name: str) -> Any:
            """The other public methods of the wrapped optimizer, such as ``train()`` and ``eval()``.

            When they return, the model has the parameters as they have changed them.
            """
            method = getattr(vars(self).get("inner"), name, None) if not name.startswith("_") else None
            if not inspect.isroutine(method):
                return super().__getattr__(name)  # raises AttributeError
            return functools.wraps(method)(functools.partial(self._call, name))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the wrapped optimizer, and bring the model's parameters up to date."""
        raise NotImplementedError

    @property
    def makes_local_steps(self) -> bool:
        """Whether each call of ``step()`` changes the parameters of this peer; see ``local_steps``."""
        return False

    def wrap(self, replica: Replica) -> None:
        """Have the groups, the state and the schedule of a replica from now on."""
        self._replica = replica
        self.scheduler = replica.scheduler
        self.share()

    def share(self) -> None:
        """Refer to the groups and state of the wrapped optimizer, which has new ones after it has loaded a state."""
        self.param_groups, self.state = self._replica.shown_groups, self.inner.state

    def next_batch(self, batch_size: int, weight: float | None = None) -> None:
        """Set the batch size of the next ``step()``, for libraries that call ``step()`` without one.

        Args:
            batch_size, weight: as for ``step()``.
        """
        self._next_batch = batch_size, weight

    def _batch_of(
        self, batch_size: int | None, weight: float | None, batch_size_per_step: int | None
    ) -> tuple[int | None, float | None]:
        """The batch size and weight that a call of ``step()`` counts.

        They are its own arguments; without these, those of the last :meth:`next_batch`; or else the default.
        """
        told, self._next_batch = self._next_batch, None
        if batch_size is None and weight is None and told is not None:
            return told
        return batch_size_per_step if batch_size is None else batch_size, weight

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ``ConfigError`` once the optimizer is made: all peers of a run must have the same parameters."""
        if hasattr(self, "inner"):
            raise ConfigError("the parameters of a run are fixed; give all groups to the wrapped optimizer at first")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer; under ``manyhands``, its position in the run and the schedule."""
        return {**self.inner.state_dict(), PLACE: self._replica.place()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, or the state of an optimizer like the wrapped one.

        Raises:
            ConfigError: a part of it is missing; nothing was loaded.
        """
        place = state_dict.get(PLACE)
        missing = [name for name in PARTS if name not in state_dict]
        missing += [f"{PLACE}.{name}" for name in PLACE_PARTS if place is not None and name not in place]
        if missing:
            raise ConfigError(
                f"this state has no {' and no '.join(map(repr, missing))}: load a result of state_dict() of "
                f"manyhands.Optimizer, or of {type(self.inner).__name__} over the same parameters"
            )
        self._replica.load({name: state_dict[name] for name in PARTS}, place)
        self.share()

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """As for any optimizer; the hook gets this one."""
        return self.inner.register_state_dict_pre_hook(lambda _: hook(self), prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """As for any optimizer; the hook gets this one."""
        return self.inner.register_state_dict_post_hook(lambda _, state: hook(self, state), prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """As for any optimizer; the hook gets this one."""
        return self.inner.register_load_state_dict_pre_hook(lambda _, state: hook(self, state), prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """As for any optimizer; the hook gets this one."""
        return self.inner.register_load_state_dict_post_hook(lambda _: hook(self), prepend)
