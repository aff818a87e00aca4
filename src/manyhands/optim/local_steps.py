"""Local steps: each peer trains by itself, and from time to time the run averages how its parameters have changed.

The wrapped optimizer is the *inner* one: with each batch a peer makes a step with it, on its *own* parameters. When the
peers together have the samples of the target, they average their *pseudo-gradients*, weighted by samples: the *agreed*
parameters, which all of them share, minus their own. All peers make the same step with an *outer* optimizer on the
agreed parameters, and continue from the result.

Position, state and digest, as described for :class:`manyhands.optim.step.replica.Replica`, are here those of the agreed
parameters and the outer optimizer.

Source: Douillard et al., DiLoCo, arXiv:2311.08105; Douillard et al., Streaming DiLoCo, arXiv:2501.18512.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from manyhands.averaging.codecs.sparse import Sparse
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.state.content import State
from manyhands.base.arguments import whole
from manyhands.base.errors import ConfigError
from manyhands.base.text import counted
from manyhands.optim.accumulator import Accumulator, Contribution
from manyhands.optim.config import MANY_STEPS
from manyhands.optim.extra_tensors import ExtraTensors
from manyhands.optim.flat import GradientLayout, are_finite
from manyhands.optim.options import options_of
from manyhands.optim.state.catching_up import MissedStep
from manyhands.optim.state.check import fault_of
from manyhands.optim.state.state import hyper_parameters_of, parameters_of, restore, specs_of, split_inner, take_options
from manyhands.optim.step.host_copy import HostCopy, Writes, copy_on_host, take_over
from manyhands.optim.step.replica import Replica, global_norm, trained_of

logger = logging.getLogger(__name__)

KEPT_SHARE = 0.5
"""The weight of a peer's own parameters in their mean with the new agreed ones, if it has made inner steps while the
average was computed (arXiv:2501.18512, section 3.2)."""
OUTER = "outer"
"""Key of the outer optimizer's state in a checkpoint."""
AGREED = "agreed"
"""Key of agreed parameters in a checkpoint. Only those that differ from the model's parameters are saved."""
SPARSE_RATE = 1.4
"""The outer rate for sparse changes: a mean of them is small, as peers send different values."""


def nesterov(params: Any) -> torch.optim.Optimizer:
    """The outer optimizer of DiLoCo."""
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class LocalSteps:
    """Makes a peer train by itself, and average with the others once in ``target_batch_size`` samples of the run.

    The number of inner steps between two averages follows from the target, the number of peers and their batches.

    Attributes:
        outer: makes the outer optimizer, which steps with the averaged change, from a list of parameter groups. The
            default is ``SGD(lr=1.0)``, which is plain averaging of parameters, and ``SGD(lr=1.4)`` with ``sparse``
            (docs/adr/0067-an-outer-rate-for-sparse-changes.md). :func:`nesterov` makes that of DiLoCo, which was
            published for hundreds of averages with hundreds of inner steps between two of them.
        fragments: number of parts in which the parameters are averaged, one after the other; more parts lower the
            peak of the traffic. Each part is averaged once in ``target_batch_size`` samples.
        overlap_steps: number of inner steps that this peer may make while an average is computed; at most half of those
            from one average of a parameter to the next.
        sparse: send only the largest changes; the others are kept and added to the next changes (SparseLoCo).
    Raises:
        ConfigError: a value cannot be used.
    """

    outer: Callable[[Any], torch.optim.Optimizer] | None = None
    fragments: int = 1
    overlap_steps: int = 0
    sparse: Sparse | None = None

    def __post_init__(self) -> None:
        fragments = whole("fragments", self.fragments, least=1, example=4)
        overlap_steps = whole("overlap_steps", self.overlap_steps, least=0, example=5)
        object.__setattr__(self, "fragments", fragments)
        object.__setattr__(self, "overlap_steps", overlap_steps)
        if self.sparse is not None and not isinstance(self.sparse, Sparse):
            raise ConfigError(f"sparse={self.sparse!r} must be made by manyhands.Sparse; for example Sparse(top=64)")
        if self.outer is not None:
            _check_outer(self.outer)

    def make_outer(self, params: Any) -> torch.optim.Optimizer:
        """Make the outer optimizer of these parameter groups."""
        if self.outer is not None:
            return self.outer(params)
        return torch.optim.SGD(params, lr=1.0 if self.sparse is None else SPARSE_RATE)

    def averaging(self, config: AveragingConfig) -> AveragingConfig:
        """The configuration of the rounds with the codec of sparse changes; ``ConfigError`` if it has another codec."""
        if self.sparse is None:
            return config
        if config.codec != AveragingConfig.codec:
            with_own = "LocalSteps(sparse=...), which has an encoding of its own"
            raise ConfigError(f"codec={config.codec!r} cannot be used with {with_own}; leave one of them out")
        return replace(config, codec=self.sparse.setting)

    def facts(self, outer: torch.optim.Optimizer) -> dict[str, str]:
        """These settings as facts of the manifest, which must be equal on all peers of a run.

        Args:
            outer: the outer optimizer that was made.
        """
        groups = [
            ", ".join(f"{name}={value!r}" for name, value in options.items() if value)
            for options in hyper_parameters_of(outer.param_groups)
        ]
        shown = "; ".join(dict.fromkeys(groups))
        parts = f"{counted(self.fragments, 'fragment')}, overlap_steps={self.overlap_steps}"
        return {"local_steps": f"outer {type(outer).__name__}({shown}), {parts}"}


class LocalReplica(Replica):
    """The agreed parameters with the outer optimizer, and this peer's own parameters with the inner one.

    Args:
        scheduler: of ``inner``; it moves once for each ``target_batch_size`` samples of the run.
        max_grad_norm: bound of the norm of each batch's gradient.
        offload: keep the inner optimizer's parameters and statistics on the host.
    Attributes:
        inner: the inner optimizer.
        own: this peer's own parameters, in the order of the groups.
    Raises:
        ConfigError: ``outer`` makes no optimizer of the given parameters, or there are fewer tensors than fragments.
    """

    norm_grows = True

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        local_steps: LocalSteps,
        *,
        max_grad_norm: float | None = None,
        offload: bool = False,
        extra: ExtraTensors | None = None,
    ) -> None:
        self.inner = inner
        self.num_fragments = local_steps.fragments
        self.overlap_steps = local_steps.overlap_steps
        self._is_sparse = local_steps.sparse is not None
        self.can_replay = not self._is_sparse  # of sparse changes nobody has the mean as it was sent
        of_model, model_parameters = parameters_of(inner), trained_of(inner)
        if self.num_fragments > len(model_parameters):
            above = f"fragments={self.num_fragments} is above the number of trained tensors"
            raise ConfigError(f"{above}; for example {len(model_parameters)}, or fewer")
        super().__init__(_outer_of(local_steps, inner), scheduler, extra=extra)
        self.writes = Writes(of_model)
        pairs = zip(of_model, parameters_of(self.optimizer), strict=True)
        self._frozen = [(own, agreed) for own, agreed in pairs if not own.requires_grad]
        self._max_inner_norm = max_grad_norm
        self.wrapped = inner
        self.model_parameters = model_parameters
        self.options = options_of(inner.param_groups)
        self.host_copy = HostCopy(inner) if offload else None
        self.own = trained_of(inner)
        self._agreed_inner_options = hyper_parameters_of(inner.param_groups)
        self._fragments = list[_Fragment]()
        for members in _fragments_of([parameter.numel() for parameter in self.own], self.num_fragments):
            own, agreed = ([those[index] for index in members] for those in (self.own, self._parameters))
            self._fragments.append(_Fragment(own, agreed, GradientLayout(agreed, self.extra.shapes)))

    # for the run

    @property
    def part(self) -> int:
        return self.position.step % self.num_fragments

    @property
    def step_parameters(self) -> tuple[Sequence[torch.Tensor], GradientLayout]:
        _, agreed, layout = self._fragments[self.part]
        return agreed, layout

    @property
    def shapes(self) -> Sequence[Sequence[int]]:
        if not self._is_sparse:
            return super().shapes
        _, layout = self.step_parameters  # all values are one tensor, so that chunks may lie across parameters
        return [(layout.num_values, 1), *layout.shapes_of_rest]

    def _advance_schedule(self, *, has_stepped: bool) -> None:
        if (self.position.step + 1) % self.num_fragments == 0:
            super()._advance_schedule(has_stepped=False)  # False, as this peer may have made no inner step

    def _options_due(self, state: State) -> Sequence[Mapping[str, Any]]:
        return self._agreed_options  # they do not change: the schedule is that of the inner optimizer

    def capture(self) -> State:
        return self._capture(self.inner)

    def check_state(self) -> None:
        with self._lock:
            self._begin_capture(self.inner)

    def _restore(self, state: State) -> None:
        """Load another peer's state. This peer's own parameters keep their difference from the agreed ones.

        The statistics of the inner optimizer are taken from the donor if this peer has made no inner step yet.
        """
        outer, inner = split_inner(state, specs_of(self.inner), len(self.extra_specs))
        options = self._agreed_inner_options if self._schedule is None else self._schedule.options_in(outer)
        if inner is not None and (fault := fault_of(inner, self.inner, options)):
            raise ValueError(f"its inner optimizer cannot be used: {fault}")
        before = [agreed.detach().clone() for agreed in self._parameters]
        has_steps = any(not torch.equal(own, was.to(own)) for own, was in zip(self.own, before, strict=True))
        is_new = not self.inner.state and not has_steps  # SGD without momentum has no statistics
        super()._restore(outer)
        _move_along(self.own, self._parameters, before)
        if inner is not None:
            take_options(inner, self.inner)
        if inner is not None and is_new:
            try:
                restore(inner, self.inner)
            except ValueError as error:  # :func:`fault_of` cannot try some kinds of optimizers on a copy
                logger.warning("This peer begins with new statistics of its inner optimizer: %s", error)
        self.options = options_of(self.inner.param_groups)
        self._show()

    def _make_up_for(self, step: MissedStep) -> None:
        """See :meth:`Replica.replay`. This peer's own parameters keep their difference from the agreed ones."""
        fragment = self._fragments[self.part]
        before = [agreed.detach().clone() for agreed in fragment.agreed]
        super()._make_up_for(step)
        _move_along(fragment.own, fragment.agreed, before)

    # for the training thread

    def step_inner(self, grad_scale: float) -> None:
        """Make an inner step with the current ``.grad``, which is divided by the scale and clipped in place."""
        gradients = [parameter.grad for parameter in self.model_parameters if parameter.grad is not None]
        if grad_scale != 1.0:
            for gradient in gradients:
                gradient.div_(grad_scale)
        if self._max_inner_norm is not None:
            norm = global_norm(_values_of(gradients))
            if norm > self._max_inner_norm:
                for gradient in gradients:
                    gradient.mul_(self._max_inner_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ does
        with self._lock:
            if self.host_copy is not None:
                for parameter, own in zip(self.model_parameters, self.own, strict=True):
                    own.grad = parameter.grad.to(own) if parameter.grad is not None else None
            self.inner.step()
            self.options = options_of(self.inner.param_groups)  # some optimizers keep changing numbers there
        self._show()

    @torch.no_grad()
    def pseudo_gradient(self, flat_N: torch.Tensor | None) -> torch.Tensor:
        """The pseudo-gradient of the next step, in the memory of ``flat_N`` if that has its size."""
        fragment = self._fragments[self.part]
        if flat_N is None or flat_N.numel() != fragment.layout.numel:
            flat_N = torch.empty(fragment.layout.numel)
        _, values, shares = fragment.layout.views(flat_N)
        for value, agreed, own in zip(values, fragment.agreed, fragment.own, strict=True):
            torch.sub(agreed, own.to(agreed), out=value)
        shares.fill_(1.0)
        fragment.layout.extra(flat_N).copy_(self.extra.contribution())
        return flat_N

    @torch.no_grad()
    def follow(self, number: int, kept_share: float = 0.0) -> None:
        """Set this peer's own parameters of a fragment to the agreed ones, or to a mean of both.

        Args:
            number: of the fragment.
            kept_share: weight of this peer's own parameters in the mean.
        """
        own_ones, agreed_ones, _ = self._fragments[number]
        for own, agreed in zip(own_ones, agreed_ones, strict=True):
            if kept_share == 0:
                own.copy_(agreed)
            else:
                own.lerp_(agreed.to(own), 1 - kept_share)
        self._show()

    @torch.no_grad()
    def differ_by(self, number: int, pseudo_gradient_N: torch.Tensor) -> None:
        """Set this peer's own parameters of a fragment to the agreed ones minus a pseudo-gradient."""
        own_ones, agreed_ones, layout = self._fragments[number]
        for own, agreed, value in zip(own_ones, agreed_ones, layout.views(pseudo_gradient_N).values, strict=True):
            own.copy_(agreed - value)
        self._show()

    def forget_inner(self) -> None:
        """Drop the statistics of the inner optimizer."""
        with self._lock:
            self.inner.state.clear()

    @contextmanager
    def agreed_in_model(self) -> Iterator[None]:
        own = [parameter.detach().clone() for parameter in self.model_parameters]
        try:  # an interrupt may come while parameters are copied
            _copy(self._parameters, self.model_parameters)
            self.writes.note()
            yield
        finally:
            _copy(own, self.model_parameters)
            self.writes.note()

    @property
    def is_overwritten(self) -> bool:
        return self.writes.are_foreign

    def take_over(self, *, is_ahead: bool = False) -> None:
        """See :meth:`Replica.take_over`. Unless this peer is ahead, the written values also become the agreed ones.

        Otherwise the next average would take them for a change by this peer's training.
        """
        if not self.writes.are_foreign:
            return
        super().take_over()
        if not is_ahead:
            with self._lock:
                self._num_changes += 1
                for own, agreed in [*zip(self.own, self._parameters, strict=True), *self._frozen]:
                    take_over(own, agreed)
        self.writes.note()

    # checkpoints

    def place(self) -> dict[str, Any]:
        pairs = zip(self.model_parameters, self._parameters, strict=True)
        agreed = {f"{i}": value for i, (own, value) in enumerate(pairs) if not torch.equal(own.to(value), value)}
        place = super().place() | {OUTER: self.optimizer.state_dict()}
        place.pop("parameters", None)  # not needed: a load sets this peer's own parameters to the agreed ones
        return place | ({AGREED: agreed} if agreed else {})

    def _load(self, state_dict: dict[str, Any], place: dict[str, Any] | None) -> None:
        kept: Mapping[str, torch.Tensor] = (place or {}).get(AGREED, {})
        is_here = self.is_at(place)
        if not is_here:
            with torch.no_grad():
                for index, (own, agreed) in enumerate(zip(self.model_parameters, self._parameters, strict=True)):
                    agreed.copy_(kept.get(f"{index}", own))
                for own, agreed in self._frozen:
                    agreed.copy_(own)
        outer = (place or {}).get(OUTER, self.optimizer.state_dict() | {"state": {}})
        super()._load(outer, place)
        self._load_optimizer(self.inner, state_dict, place)
        if not is_here and self.has_modes:
            self.inner.train()  # type: ignore[attr-defined]  # the agreed parameters are those of train mode
            if place is None:  # a checkpoint of plain torch may have had those of eval mode
                _copy(self.own, self._parameters)
        self.options = options_of(self.inner.param_groups)


@torch.no_grad()
def _move_along(own: Sequence[torch.Tensor], agreed: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
    """Add the change of the agreed parameters since ``before`` to a peer's own ones.

    Those that were equal to the agreed ones stay so, to the last bit.
    """
    for one, now, was in zip(own, agreed, before, strict=True):
        if torch.equal(one, was.to(one)):
            one.copy_(now)
        else:
            one.add_((now - was).to(one))


class _Fragment(NamedTuple):
    """A part of the parameters, which are averaged together."""

    own: list[torch.Tensor]
    agreed: list[torch.Tensor]
    layout: GradientLayout


class InnerSteps(Accumulator):
    """Makes this peer's inner steps, and counts the samples behind its difference from the agreed parameters."""

    def __init__(self, replica: LocalReplica) -> None:
        super().__init__()
        self._replica = replica
        self._spare_N: torch.Tensor | None = None  # memory for a contribution
        self._num_steps = 0  # inner steps so far
        self._frozen_at = 0  # their number at the last contribution
        self._averaged_at = 0  # their number at the last contribution that was averaged
        self._out: tuple[int, float] | None = None  # the fragment and weight of a contribution, until its step ends
        self._must_end_at = 0  # the number of inner steps at which this peer waits for the average
        self._weights = [0.0] * replica.num_fragments  # of the samples behind the difference in each fragment
        self._num_between = 0  # inner steps from one average of a fragment to the next
        self._has_told: set[str] = set()  # the kinds of advice that were given

    def add(self, samples: int, weight: float | None = None, grad_scale: float = 1.0, at_step: int = 0) -> bool:
        weight = float(samples) if weight is None else weight
        gradients = [parameter.grad for parameter in self._replica.model_parameters if parameter.grad is not None]
        if not are_finite(_values_of(gradients)):
            return False
        if weight > 0:
            self._replica.step_inner(grad_scale)
            self._num_steps += 1
        self._count(samples, at_step)
        self._weights = [before + weight for before in self._weights]
        return True

    def fault(self) -> str:
        if self._out is not None:  # checked when the step of that contribution has ended
            return ""
        if are_finite(self._replica.own):
            return ""
        self._replica.forget_inner()
        return "the parameters of this peer are not finite any more after its inner steps; look at its learning rate"

    def freeze(self) -> Contribution:
        replica, fragment = self._replica, self._replica.part
        mean_N, self._spare_N = replica.pseudo_gradient(self._spare_N), None
        self._out = fragment, self._weights[fragment]
        weight = self._weights[fragment] / replica.num_fragments  # a sample counts in a step of each fragment
        refill = None if replica.overlap_steps else functools.partial(replica.pseudo_gradient, None)
        contribution = Contribution(mean_N, self.samples, weight, self.since_step, refill)
        num_steps = self._num_steps - self._averaged_at
        self._num_between = num_steps * replica.num_fragments
        most = max(min(num_steps, self._num_between // 2), 1)  # docs/adr/0069-an-overlap-of-half.md
        if replica.overlap_steps > most and num_steps > 0 and self._averaged_at and "overlap" not in self._has_told:
            self._has_told.add("overlap")  # but not before the first average, as a newcomer makes only some of them
            logger.warning("overlap_steps=%d is cut to %d: at most half of the %d inner steps from one average of a "
                           "parameter to the next, and one average at a time. A larger target_batch_size leaves room "
                           "for more", replica.overlap_steps, most, self._num_between)  # fmt: skip
        self._must_end_at = self._num_steps + max(min(replica.overlap_steps, most), 1)
        self._frozen_at = self._num_steps
        super().drop()
        return contribution

    def advice(self) -> str:
        """A warning, once, if there are many inner steps from one average with other peers to the next; else empty."""
        if self._num_between <= MANY_STEPS or "many" in self._has_told:
            return ""
        self._has_told.add("many")
        return (
            f"This peer made {self._num_between} inner steps from one average to the next, more than the {MANY_STEPS} "
            "that DiLoCo chose. Its perplexity was 2.9% higher with 1000 than with 50 (arXiv:2311.08105). A smaller "
            "target_batch_size makes them fewer"
        )

    @property
    def is_ahead(self) -> bool:
        """Whether this peer has made inner steps that are in no average yet."""
        return self._out is not None or any(self._weights)

    @property
    def must_wait(self) -> bool:
        """Whether the next inner step must wait for the average that is computed in the background."""
        return self._num_steps >= self._must_end_at

    def take_back(self, contribution: Contribution) -> None:
        self._out = None
        if contribution.refill is None:  # with one, a round that was interrupted may still write to the vector
            self._spare_N = contribution.mean_N
        if contribution.samples:
            self._count(contribution.samples, contribution.since_step)
            self.was_out = True

    def carry(self, contribution: Contribution) -> None:
        """Move this peer's own parameters to the agreed ones, and keep the difference that was left out.

        After further inner steps, only half of the difference is kept.
        """
        assert self._out is not None
        if self._num_steps == self._frozen_at:
            self._replica.differ_by(self._out[0], contribution.mean_N)
        else:
            self._replica.follow(self._out[0], KEPT_SHARE)
        self._averaged_at = self._frozen_at
        self.take_back(contribution)

    def release(self, contribution: Contribution, *, is_free: bool) -> None:
        """Move this peer's own parameters to the agreed ones; half of the way if it has made inner steps meanwhile."""
        assert self._out is not None
        fragment, weight = self._out
        self._replica.follow(fragment, KEPT_SHARE if self._num_steps != self._frozen_at else 0.0)
        self._weights[fragment] -= weight
        self._out, self._averaged_at = None, self._frozen_at
        if is_free:
            self._spare_N = contribution.mean_N

    def drop(self) -> None:
        super().drop()
        for fragment in range(self._replica.num_fragments):
            self._replica.follow(fragment)
        self._weights = [0.0] * self._replica.num_fragments


def _check_outer(outer: Any) -> None:
    works = "lambda params: torch.optim.SGD(params, lr=1.0)"
    if isinstance(outer, type):
        raise ConfigError(f"outer={outer.__name__} is a class, whose own lr would be used; write {works}")
    try:
        inspect.signature(outer).bind([])
    except (TypeError, ValueError):
        raise ConfigError(
            f"outer is of type {type(outer).__name__} and must be a function of one argument, the parameters, that "
            f"makes an optimizer; for example {works}"
        ) from None


def _outer_of(local_steps: LocalSteps, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    groups = [{"params": [copy_on_host(parameter) for parameter in group["params"]]} for group in inner.param_groups]
    agreed = [parameter for group in groups for parameter in group["params"]]
    outer = local_steps.make_outer(groups)
    if not isinstance(outer, torch.optim.Optimizer) or [*map(id, parameters_of(outer))] != [*map(id, agreed)]:
        made = f"{type(outer).__name__} of others" if isinstance(outer, torch.optim.Optimizer) else repr(outer)
        raise ConfigError(
            f"outer made {made}, which is not an optimizer of the given parameter groups; for example "
            "lambda params: torch.optim.SGD(params, lr=1.0)"
        )
    return outer


def _values_of(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values of gradients; of a sparse one, the stored values."""
    return [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]


def _fragments_of(sizes: Sequence[int], num_fragments: int) -> list[list[int]]:
    """Divide tensors into fragments of about equal size: the largest first, each into the smallest fragment so far."""
    totals = [0] * num_fragments
    members = [list[int]() for _ in range(num_fragments)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        smallest = min(range(num_fragments), key=lambda fragment: (totals[fragment], len(members[fragment])))
        totals[smallest] += sizes[index]
        members[smallest].append(index)
    return [sorted(of_one) for of_one in members]


@torch.no_grad()
def _copy(values: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
