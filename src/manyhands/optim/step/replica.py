"""One peer's trained state, and how steps change it: parameters, optimizer, schedule, and position in the run."""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import math
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch.optim.lr_scheduler import LRScheduler

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position
from manyhands.averaging.roster import Roster, next_place
from manyhands.averaging.state.ancestry import extended
from manyhands.averaging.state.content import Origin, State, spec_of
from manyhands.averaging.timing import YIELD_S
from manyhands.optim.extra_tensors import ExtraTensors
from manyhands.optim.flat import GradientLayout, are_finite, assign_flat, flattened
from manyhands.optim.manifest import PROTOCOL, RATES, RunManifest, described_schedule
from manyhands.optim.options import check_unchanged, options_of
from manyhands.optim.run.drift import KNOWN_OPTIMIZERS, Sketch, bound_of, sketch_of
from manyhands.optim.run.progress import sum_of_samples
from manyhands.optim.run.step_rounds import Averaged
from manyhands.optim.serializable import merged, serializable_part
from manyhands.optim.state.catching_up import MissedStep
from manyhands.optim.state.check import ScheduleAtBegin, fault_of
from manyhands.optim.state.state import (
    Capture,
    digest_of_parameters,
    hyper_parameters_of,
    load_packed,
    names_of,
    parameters_of,
    restore,
    specs_of,
)
from manyhands.optim.state.tree import tensors_in, with_tensors
from manyhands.optim.step.host_copy import HostCopy, InTrainMode, Writes
from manyhands.optim.step.shards import Shards, WholeCopy

logger = logging.getLogger(__name__)

MAX_COPIES = 3
"""The largest number of attempts to copy the state; only the last one holds up a step that wants to begin."""
MODES = ("train", "eval")
"""Methods of schedule-free optimizers, which exchange the parameters in the model for those to train on or to evaluate.
"""
DTYPES = "dtypes"
"""Key of the dtypes of the optimizer's parameters in a checkpoint."""
LARGE = 1e7
"""Known optimizers multiply at most five numbers: SGD the learning rate, momentum, dampening, weight decay and a value.
If each of them is below ``LARGE``, the product is finite in float32."""
SMALLEST_EPS = 1e-20
"""A value below ``LARGE``, divided by this number and multiplied by a learning rate below ``LARGE``, is also finite."""


class Replica:
    """One peer's parameters, optimizer and schedule; the same on every peer at the same position.

    A lock keeps the state consistent while it is copied for a newcomer. Only one thread at a time makes steps.

    Args:
        shards: of the model, if the ranks of this peer have split it.
    Attributes:
        wrapped: the optimizer that the user gave.
        optimizer: the optimizer that makes the global steps: the same one, or with local steps the outer one.
        position: of the optimizer's parameters; the model's may be a step behind.
        lineage_samples: number of samples in all steps that led to the position.
        origin: the last step that led there; None at the beginning, or if it is unknown.
        ancestry: beginnings of the lineages on the way there, by which branches of one run are told apart; see
            :mod:`manyhands.averaging.state.ancestry`.
        roster: of the run at the position; empty before the first step.
        seal: digest of what the last step committed. The lineage follows from the seal and the roster; see
            :mod:`manyhands.averaging.roster`.
        options: of the parameter groups, as the last step, its schedule or a loaded state has left them.
        mode: the name in ``MODES`` that was called last; empty if none was, or if a checkpoint has changed the options
            since.
        can_replay: whether a newcomer can make past steps of the run from their averaged vectors alone.
        norm_grows: whether the values of a contribution are larger the more samples it has.
    """

    can_replay = True
    norm_grows = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        *,
        max_grad_norm: float | None = None,
        offload: bool = False,
        extra: ExtraTensors | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.extra = ExtraTensors() if extra is None else extra
        self.extra_specs = [spec_of(*named) for named in zip(self.extra.names, self.extra.agreed, strict=True)]
        self.optimizer = self.wrapped = optimizer
        self.model_parameters = trained_of(optimizer)
        self.writes = Writes(parameters_of(optimizer))
        self.scheduler = scheduler
        self._schedule = ScheduleAtBegin(scheduler) if scheduler is not None else None
        self._shards = shards
        self.host_copy: HostCopy | None = None  # made after the schedule, which sets options
        if shards is not None:
            self.host_copy = WholeCopy(optimizer, shards)
        elif offload:
            self.host_copy = HostCopy(optimizer)
        self._max_grad_norm = max_grad_norm
        self._parameters = trained_of(optimizer)
        self._layout = GradientLayout(self._parameters, self.extra.shapes)
        self._lock = threading.Lock()
        self._num_changes = 0  # of the state; :meth:`capture` begins anew if it has risen
        self.position = Position(0, hashlib.sha256(digest_of_parameters(optimizer)).digest())
        self.lineage_samples = 0
        self.origin: Origin | None = None
        self.ancestry = b""
        self.roster = Roster()
        self.seal = b""
        self._agreed_options = hyper_parameters_of(optimizer.param_groups)
        self.options = options_of(self.wrapped.param_groups)
        self.mode = ""
        self._in_train_mode: InTrainMode | None = None
        self._finer: dict[str, torch.Tensor] = {}  # the last ``finer()`` of a host copy that was removed

    @property
    def part(self) -> int:
        """Number of the part of the parameters that the next step changes; always 0 unless there are fragments."""
        return 0

    @property
    def step_parameters(self) -> tuple[Sequence[torch.Tensor], GradientLayout]:
        """The parameters that the next step changes, and the layout of their gradients."""
        return self._parameters, self._layout

    @property
    def shapes(self) -> Sequence[Sequence[int]]:
        """The shapes of the tensors in the vector of the next step, in order."""
        return self.step_parameters[1].shapes

    def advance(self, averaged_N: torch.Tensor, outcome: Averaged) -> str:
        """Make the next global step with an averaged gradient.

        Returns why the update was refused, which leaves the parameters as they were; empty if it was made. The vector
        is changed, and averaged parameters to start from are taken out of the outcome. If the wrapped optimizer raises,
        the position stays. If the schedule raises, the step is already made.

        Raises:
            ConfigError: something has changed an option of the groups; no step was made.
        """
        with self._lock:
            self._num_changes += 1
            # again, as :meth:`check_options` was called before a step in the background began
            check_unchanged(self.options, self.wrapped.param_groups)
            if outcome.parameters_N is not None:
                assign_flat(self._parameters, outcome.parameters_N)
                outcome.parameters_N = None  # the update needs memory
            move_statistics(self.optimizer)
            parameters, layout = self.step_parameters
            extra_N = layout.extra(averaged_N).clone()
            reason = guarded_step(self.optimizer, parameters, layout, averaged_N, self._max_grad_norm)
            if not reason:
                self.extra.agree(extra_N)
            try:
                self._advance_schedule(has_stepped=not reason)
            finally:  # the parameters have moved, also if the schedule raises
                self.lineage_samples = sum_of_samples([self.lineage_samples, outcome.samples])
                shares = None if outcome.is_in_grid else list(outcome.shares)  # no peer there knows all contributors
                self.origin = Origin(self.position, shares)
                self.ancestry = extended(self.ancestry, outcome.lineage)
                self.roster, self.seal = outcome.roster, outcome.seal
                self.position = Position(self.position.step + 1, outcome.lineage)
                self.options = options_of(self.wrapped.param_groups)
        return reason

    def replay(self, step: MissedStep) -> None:
        """Make a committed step that this peer missed, with the same vector as its group."""
        self._make_up_for(step)
        self.copy_to_model()

    def _make_up_for(self, step: MissedStep) -> None:
        manifest = step.manifest
        position, roster, seal = next_place(self.position, self.roster, manifest)
        samples, shares = sum_of_samples(manifest.weights), manifest.contributors()
        self.advance(step.mean_N, Averaged(None, position.lineage, samples, shares=shares, roster=roster, seal=seal))

    def _advance_schedule(self, *, has_stepped: bool) -> None:
        if self.scheduler is None:
            return
        if has_stepped:
            self.scheduler.step()
            return
        with warnings.catch_warnings():  # torch warns if a schedule moves before the optimizer has made a step
            warnings.simplefilter("ignore", UserWarning)
            self.scheduler.step()

    def flat_parameters(self) -> torch.Tensor:
        """A copy of the trained parameters as one float32 vector on the host; safe to call from any thread."""
        with self._lock:
            return flattened(self._parameters)

    def sketch(self) -> Sketch:
        """The sketch by which peers compare their parameters after this step; see :mod:`manyhands.optim.run.drift`."""
        with self._lock:
            return sketch_of([*self._parameters, *self.extra.agreed_floats], self.position.step)

    @property
    def drift_bound(self) -> float:
        """How far rounding may separate the peers' parameters; see :func:`manyhands.optim.run.drift.bound_of`."""
        return bound_of({parameter.dtype for parameter in self._parameters}, type(self.optimizer))

    def copy_to_model(self) -> None:
        """Copy parameters and extra tensors to the model."""
        self._show()
        self.extra.copy_to_model()

    def _show(self) -> None:
        """Copy the parameters of the wrapped optimizer to the model, if the optimizer works on copies."""
        if self.host_copy is not None:
            self.host_copy.copy_to_model()
        self.writes.note()

    @property
    def is_overwritten(self) -> bool:
        """Whether something else has written to the model's parameters, so that the optimizer's copies differ."""
        return self.host_copy is not None and self.writes.are_foreign

    def take_over(self, *, is_ahead: bool = False) -> None:
        """Copy what something else, such as a loaded checkpoint, has written to the model to the optimizer's copies.

        Args:
            is_ahead: with local steps, whether this peer has made inner steps that are in no average yet.
        """
        if self._in_train_mode is not None and self.writes.are_foreign:
            self._in_train_mode = None
        if self.is_overwritten and self.host_copy is not None:
            with self._lock:
                self._num_changes += 1
                self.host_copy.take_over()
            self.writes.note()

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the wrapped optimizer, and copy its parameters to the model.

        While an optimizer is in eval mode, newcomers still get the parameters of train mode, and ``train()`` puts them
        back bit by bit.
        """
        self.check_options(is_stepping=False)
        self.take_over(is_ahead=True)
        with self._lock:
            self._num_changes += 1
            if self.has_modes and name == "eval" and self._in_train_mode is None:
                self._in_train_mode = InTrainMode(self.wrapped)
            result = getattr(self.wrapped, name)(*args, **kwargs)
            if self.has_modes and name in MODES:
                self.mode = name
                self._after_mode(name)
            self.options = options_of(self.wrapped.param_groups)
        self._show()
        return result

    @property
    def has_modes(self) -> bool:
        """Whether the wrapped optimizer has all of ``MODES``."""
        return all(callable(getattr(self.wrapped, mode, None)) for mode in MODES)

    def _after_mode(self, name: str) -> None:
        before = self._in_train_mode
        if before is None:
            return
        if name == "train":
            before.put_back()
        # if eval() has changed nothing, the optimizer was in eval mode before, say by a checkpoint: nothing to put back
        if name == "train" or not before.differs():
            self._in_train_mode = None

    def release(self) -> None:
        """Have the wrapped optimizer work on the model's parameters again.

        The optimizer's copies are copied to the model first, unless something else has written to that, or the model is
        in shards: the other ranks need not have called this. Nothing is written to a model that has their values
        already: another thread may be in a backward pass, for which autograd demands the parameters of the forward.
        """
        if self.host_copy is None:
            return
        with self._lock:
            if self._shards is None and not self.is_overwritten and self.host_copy.differs_from_model():
                self._show()
            self._finer = self.host_copy.finer()
            self.host_copy.remove()
            self.host_copy = None

    def check_options(self, *, is_stepping: bool) -> None:
        """Raise ``ConfigError`` if something other than the schedule has changed an option of the groups.

        Args:
            is_stepping: a step is made in the background, which may change the optimizer's options at this moment.
        """
        if self.host_copy is not None:
            check_unchanged(self.host_copy.shown_options, self.host_copy.shown_groups)
        if not is_stepping:
            check_unchanged(self.options, self.wrapped.param_groups)

    @property
    def shown_groups(self) -> list[dict[str, Any]]:
        """The parameter groups as users see them, with the model's own parameters."""
        return self.wrapped.param_groups if self.host_copy is None else self.host_copy.shown_groups

    def capture(self) -> State:
        """Copy the state for a newcomer, without the digests of its tensors; safe to call from any thread."""
        return self.capture_agreed()

    def capture_agreed(self) -> State:
        """Copy the part of the state that is equal on all peers, like :meth:`capture`."""
        return self._capture()

    def _capture(self, inner: torch.optim.Optimizer | None = None) -> State:
        """Copy the state, with that of the inner optimizer if there is one.

        A step that begins meanwhile waits for a few milliseconds at most; then the copy begins anew. The last of
        ``MAX_COPIES`` attempts has steps wait until it has ended.
        """
        for _ in range(MAX_COPIES - 1):
            with self._lock:
                capture = self._begin_capture(inner)
                num_changes = self._num_changes
            state = capture.copy(self._between_steps, functools.partial(self._has_changed_since, num_changes))
            if state is not None:
                return state
        with self._lock:
            state = self._begin_capture(inner).copy()
        assert state is not None
        return state

    def _has_changed_since(self, num_changes: int) -> bool:
        return self._num_changes != num_changes

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        with self._lock:
            yield
        time.sleep(YIELD_S)  # time for a waiting step to take the lock

    def _begin_capture(self, inner: torch.optim.Optimizer | None) -> Capture:
        schedule = self.scheduler.state_dict() if self.scheduler is not None else {}
        extra = list(zip(self.extra_specs, self.extra.agreed, strict=True))
        place = self.position, self.lineage_samples, self.origin
        optimizer, inner = self._as_trained(self.optimizer), self._as_trained(inner)
        return Capture(optimizer, schedule, *place, extra, inner, self.ancestry, self.roster, self.seal)

    def _as_trained(self, optimizer: Any) -> Any:
        """What is captured as this optimizer: itself, or its copy of train mode while it is in eval mode."""
        is_evaluated = self._in_train_mode is not None and optimizer is self.wrapped
        return self._in_train_mode if is_evaluated else optimizer

    def check_state(self) -> None:
        """Raise ``ConfigError`` if newcomers could not load the state; the error names the value."""
        with self._lock:
            self._begin_capture(None)

    def restore(self, state: State) -> None:
        """Load another peer's state.

        Raises:
            ValueError: it does not fit, or cannot be trained on; nothing has changed.
        """
        with self._lock:
            self._restore(state)
            if self.mode == "train":  # the donor may have loaded a checkpoint that was saved in eval mode
                self.wrapped.train()  # type: ignore[attr-defined]
                self.options = options_of(self.wrapped.param_groups)
        self.copy_to_model()

    def _restore(self, state: State) -> None:
        if fault := fault_of(state, self.optimizer, self._options_due(state), self.extra_specs):
            raise ValueError(fault)
        self._num_changes += 1
        self._set_schedule(restore(state, self.optimizer, self.extra_specs))
        first = len(parameters_of(self.optimizer))
        self.extra.load(state.tensors[first : first + len(self.extra_specs)])
        self.options = options_of(self.wrapped.param_groups)
        self.position = state.header.position
        self.lineage_samples = state.header.lineage_samples
        self.origin = state.header.origin
        self.ancestry = state.header.ancestry
        self.roster, self.seal = state.header.roster, state.header.seal

    def _options_due(self, state: State) -> Sequence[Mapping[str, Any]]:
        """The options that a state's parameter groups must have.

        Raises:
            ValueError: the state's schedule is not that of the run.
        """
        return self._agreed_options if self._schedule is None else self._schedule.options_in(state)

    @contextmanager
    def agreed_in_model(self) -> Iterator[None]:
        """Within the block, the model has the parameters that all peers agree on; without local steps always so."""
        yield

    def manifest(
        self, run_id: str, target_batch_size: int, averaging: AveragingConfig, facts: dict[str, str]
    ) -> RunManifest:
        """The settings of this peer, which must be equal on all peers of the run."""
        if averaging.max_group_size != AveragingConfig.max_group_size:
            facts = facts | {"max_group_size": str(averaging.max_group_size)}
        if averaging.aggregate != AveragingConfig.aggregate:
            facts = facts | {"aggregate": averaging.aggregate}
        if self._schedule is not None:
            facts = facts | {RATES: self._schedule.rates()}
        groups = hyper_parameters_of(self.wrapped.param_groups)
        for group in groups:
            group["lr"] = group.pop("initial_lr", group["lr"])
        named = list(zip(names_of(self.wrapped), parameters_of(self.optimizer), strict=True))
        return RunManifest(
            protocol=PROTOCOL,
            run_id=run_id,
            target_batch_size=target_batch_size,
            tensors=[spec_of(name, parameter) for name, parameter in named],
            frozen=[name for name, parameter in named if not parameter.requires_grad],
            optimizer=type(self.wrapped).__name__,
            hyper_parameters=groups,
            scheduler=described_schedule(self.scheduler),
            codec=averaging.codec,
            extra=facts,
            extra_tensors=self.extra_specs,
        )

    # checkpoints

    def place(self) -> dict[str, Any]:
        """The part of a checkpoint that says where this peer is in the run.

        It has the position, the schedule, and, where the optimizer works on copies, those that are more precise than
        the model's parameters.
        """
        finer = self.host_copy.finer() if self.host_copy is not None else self._finer
        return ({"parameters": finer} if finer else {}) | {
            "step": self.position.step,
            "lineage": self.position.lineage.hex(),
            "lineage_samples": self.lineage_samples,
            "ancestry": self.ancestry.hex(),
            "roster": msgspec.msgpack.encode(self.roster).hex(),
            "seal": self.seal.hex(),
            "scheduler": serializable_part(self.scheduler.state_dict()) if self.scheduler is not None else {},
            DTYPES: self._dtypes(),
        }

    def load(self, state_dict: dict[str, Any], place: dict[str, Any] | None) -> None:
        """Load a checkpoint, and move to the position where it was taken.

        Args:
            state_dict: of the wrapped optimizer.
            place: what :meth:`place` has returned; None if the checkpoint is one of plain torch.
        """
        with self._lock:
            self._num_changes += 1
            is_here, options = self.is_at(place), self.options
            if not is_here:
                self.extra.load(self.extra.own)  # the user has loaded these tensors with the model
            if self.host_copy is not None:
                self.host_copy.take_over(place.get("parameters") if place is not None else None)
            self._load(state_dict, place)
            if self.host_copy is not None:
                self.host_copy.show_options()
            if self.options != options:  # the checkpoint may be of another mode
                self.mode = ""
            if not is_here or self.options != options:
                self._in_train_mode = None

    def is_at(self, place: dict[str, Any] | None) -> bool:
        """Whether a checkpoint was taken at this peer's present position.

        Then what all peers agree on is the same already. ``accelerate.prepare`` loads such a checkpoint, with what
        :meth:`place` has just returned.
        """
        here = self.position.step, self.position.lineage.hex()
        return place is not None and (place.get("step"), place.get("lineage")) == here

    def _load(self, state_dict: dict[str, Any], place: dict[str, Any] | None) -> None:
        self._load_optimizer(self.optimizer, state_dict, place)
        self.options = options_of(self.wrapped.param_groups)
        if place is not None:
            self._set_schedule(place["scheduler"])
            self.position = Position(place["step"], bytes.fromhex(place["lineage"]))
            self.lineage_samples = place["lineage_samples"]
            self.origin = None
            self.ancestry = bytes.fromhex(place["ancestry"])
            self.roster = msgspec.msgpack.decode(bytes.fromhex(place["roster"]), type=Roster)
            self.seal = bytes.fromhex(place["seal"])

    def _load_optimizer(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], place: dict[str, Any] | None
    ) -> None:
        """Load a checkpoint into an optimizer.

        If the parameters have the dtypes that they had in the checkpoint, the statistics keep theirs, too; else torch
        converts them.
        """
        is_alike = place is not None and place.get(DTYPES) == self._dtypes()
        if is_alike:
            load_packed(optimizer, state_dict)
        else:
            optimizer.load_state_dict(state_dict)

    def _dtypes(self) -> list[str]:
        return [spec.dtype for spec in specs_of(self.wrapped)]

    def _set_schedule(self, schedule: dict[str, Any]) -> None:
        if self.scheduler is not None:
            self.scheduler.load_state_dict(merged(self.scheduler.state_dict(), schedule))


def trained_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that are not frozen, in the order of the groups."""
    return [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]


def guarded_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    layout: GradientLayout,
    averaged_N: torch.Tensor,
    max_grad_norm: float | None = None,
) -> str:
    """Clip the averaged gradient, and make a step with it. If the result is not finite, undo the step.

    Returns why the step was undone or not made; empty if it was made. All peers have the same vector, parameters and
    statistics, so all refuse the same steps.

    Args:
        averaged_N: in the given layout; it is changed.
        max_grad_norm: bound of the norm of all gradients together; None for no bound.
    """
    values_N = averaged_N[: layout.num_values]
    norm = global_norm([values_N])  # finite only if all values are
    if not math.isfinite(norm) or not are_finite([averaged_N[layout.num_values :]]):
        return "the averaged gradient is not finite, or its square is not"
    if max_grad_norm is not None and norm > max_grad_norm:
        values_N.mul_(max_grad_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ does
        norm = max_grad_norm
    trained = set(map(id, parameters))
    frozen = [parameter for parameter in parameters_of(optimizer) if id(parameter) not in trained]
    is_finite = _is_surely_finite(optimizer, parameters, norm)
    values = [] if is_finite else [parameter.detach().clone() for parameter in parameters]
    memo: dict[int, Any] = {}  # one tensor may be a statistic of several parameters
    statistics = {} if is_finite else {owner: copy.deepcopy(old, memo) for owner, old in optimizer.state.items()}
    try:
        with layout.installed(parameters, averaged_N, frozen):
            optimizer.step()
        is_finite = is_finite or are_finite([*parameters, *_statistics_of(optimizer)])
    finally:
        if not is_finite:
            with torch.no_grad():
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.copy_(value)
            optimizer.state.clear()
            optimizer.state.update(statistics)
    return "" if is_finite else "with it, the parameters or the optimizer's statistics would not be finite"


def move_statistics(optimizer: torch.optim.Optimizer) -> None:
    """Move each parameter's statistics to its device: the user may have moved the model after the last step."""

    def beside(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.to(parameter.device) if value.dim() > 0 and value.shape == parameter.shape else value

    for parameter, statistics in optimizer.state.items():
        if isinstance(parameter, torch.Tensor):
            optimizer.state[parameter] = with_tensors(statistics, functools.partial(beside, parameter))


def global_norm(tensors: Sequence[torch.Tensor]) -> float:
    """The Euclidean norm of all values together, in float32."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0


def _is_surely_finite(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], gradient_norm: float
) -> bool:
    """Whether the optimizer's formula guarantees a finite update: it is a known one, with moderate inputs only."""
    groups = optimizer.param_groups
    options = [value for group in groups for value in group.values() if isinstance(value, float | int | torch.Tensor)]
    if type(optimizer) not in KNOWN_OPTIMIZERS or any(parameter.dtype == torch.float16 for parameter in parameters):
        return False  # the largest value of float16 is 65504
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in (*parameters, *_statistics_of(optimizer)):
        if tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    # one kernel and one synchronization for each kind; the maximum is NaN if one of the norms is
    norms = [torch.stack(torch._foreach_norm(kind)).float().max().item() for kind in by_kind.values()]  # noqa: SLF001
    sizes = (gradient_norm, *map(float, options), *norms)
    return all(abs(size) < LARGE for size in sizes) and all(group.get("eps", 1.0) >= SMALLEST_EPS for group in groups)


def _statistics_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for value in tensors_in(dict(optimizer.state)) if value.is_floating_point()]
