"""One peer made of several processes: the ranks of a ``torch.distributed`` job, for example one for each GPU.

All ranks make each call of the optimizer. Rank 0 gathers the sizes of their batches, makes the call for the peer, and
broadcasts the result. With ``DistributedDataParallel`` each rank has the whole model. With FSDP2 each has a shard of it
(``manyhands/optim/step/shards.py``).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from manyhands.averaging.state.content import spec_of
from manyhands.base.errors import ConfigError, RankLost, Unavailable
from manyhands.base.from_hivemind import with_advice
from manyhands.base.parameter_spec import ParameterSpec
from manyhands.optim.optimizer import Optimizer
from manyhands.optim.options import OptimizerMaker, checked_parameters, is_sharded, made_optimizer
from manyhands.optim.ranks import CallOutcome, Ranks, Request
from manyhands.optim.serializable import merged
from manyhands.optim.state.state import hyper_parameters_of, parameters_of, specs_of
from manyhands.optim.step.global_step import Statistics
from manyhands.optim.step.replica import MODES
from manyhands.optim.step.shards import Shards, check_shards
from manyhands.optim.wrapper import OptimizerWrapper
from manyhands.peer import BlockingPeer

logger = logging.getLogger(__name__)

FIGURES = ("global_step", "num_peers", "samples_accumulated", "is_stepping", "samples_per_second", "last_contribution")
"""Attributes of the peer's optimizer that all ranks have after each call, like a copy of its ``statistics``."""


class StepArguments(NamedTuple):
    """One rank's arguments to ``step``."""

    samples: int | None
    weight: float | None


def added_up(batches: Sequence[StepArguments]) -> tuple[Any, Any]:
    """The batch size and weight of all ranks together. A value that breaks its rule is returned in place of the sum."""
    sums: list[float | None] = []
    for name, numbers in zip(("a batch size", "weight"), zip(*batches, strict=True), strict=True):
        given = [number for number in numbers if number is not None]
        if given and len(given) != len(batches):
            raise ConfigError(f"{name} was given on {len(given)} of {len(batches)} ranks; give it on all, or on none")
        wrong = (number for number in given if not number >= 0)
        sums.append(next(wrong, sum(given)) if given else None)
    samples, weight = sums
    return (None, None) if samples is None else (samples, weight)


def unequal(batches: Sequence[StepArguments]) -> str:
    """A warning if the ranks' batches differ: the mean of their gradients is then not the mean over all samples."""
    sizes = [batch.samples if batch.weight is None else batch.weight for batch in batches]
    if len(set(sizes)) == 1:
        return ""
    return (
        f"the ranks have batches of {', '.join(f'{size:g}' for size in sizes if size is not None)}, but "
        "DistributedDataParallel and FSDP2 count each rank alike: give all of them equal batches, or multiply the loss "
        "of each by the number of ranks and by its part of the whole batch"
    )


class ShardedOptimizer(Optimizer):
    """The optimizer of rank 0 where FSDP2 has split the model: it steps on a copy of the whole model on the host.

    Raises:
        ConfigError: also if an option does not work with shards.
    """

    def __init__(self, optimizer: OptimizerMaker, *, shards: Shards, **options: Any) -> None:
        refused = {
            "local_steps": "each peer then steps alone with each batch, on its GPU, and rank 0 alone can step here",
            "model": "the values of the parameters that the optimizer does not have are on several ranks, so they "
            "cannot be compared: leave it out, and give their digest with must_match",
        }
        for name, why in refused.items():
            if options.get(name) is not None:
                raise ConfigError(f"{name} does not work with FSDP2, whose parameters are split over the ranks: {why}")
        if options.get("offload") is False:
            raise ConfigError("offload=False does not work with FSDP2: rank 0 steps on a copy of the whole model on "
                              "the host; leave it out")  # fmt: skip
        self._shards = shards
        super().__init__(optimizer, **options | {"offload": True})


class ProcessGroupOptimizer(OptimizerWrapper):
    """:class:`manyhands.Optimizer` for a job of several processes, which together are one peer.

    ``DistributedDataParallel`` averages the gradients over the ranks of the job. Rank 0 is the peer: it takes part in
    the run with the samples of all ranks, and makes the updates; after each update the other ranks get its parameters.
    All ranks have the same counts, such as ``global_step``, after each call, so they leave a loop together.

    The model may instead be split over all ranks by FSDP2 (``fully_shard``). Rank 0 then holds a copy of the whole
    model and the optimizer's state in the memory of the host. It gathers the gradients for each global step, and after
    the update each rank gets its part of the parameters.

    All ranks must make the same calls, as with DDP, except :meth:`close`, and :meth:`state_dict` unless the model is
    split. If a call fails on rank 0, all ranks raise an error.

    Args:
        optimizer: as for :class:`manyhands.Optimizer`; on ranks other than 0 it never has a state. With FSDP2 it must
            have none yet, and loses it again when the optimizer leaves the run.
        params: parameters or groups, if ``optimizer`` is a function.
        peer: this machine's peer on rank 0; None on the others.
        batch_size_per_step: samples behind each call of :meth:`step` on this rank.
        buffers: as for :class:`manyhands.Optimizer`, on all ranks; those of rank 0 count.
        extra_tensors: likewise.
        options: the other arguments of :class:`manyhands.Optimizer`. ``target_batch_size`` counts the samples of all
            peers with all their ranks. With FSDP2 ``offload`` is always on, and ``local_steps`` and ``model`` are
            refused.

    Attributes:
        inner: the wrapped optimizer.
        leader: the optimizer of the peer, on rank 0; None on the others.
    Raises:
        ConfigError: an argument breaks a rule, or the ranks do not fit together.
        ManifestMismatch: the model or the settings differ from those of the run; other ranks raise ConfigError.
        Unavailable: as for :class:`manyhands.Optimizer`.
        RankLost: another rank is gone or has failed. All methods that all ranks must call raise this, too.
    """

    _step_supports_amp_scaling = True
    """As in :class:`manyhands.Optimizer`. DDP gives all ranks the same gradients, so the same overflows."""

    global_step: int
    """Optimizer steps of the run that the model here has followed."""
    statistics: Statistics
    """A copy of the peer's counts so far, with the samples of all ranks."""
    num_peers: int
    """Number of peers at this peer's global step, this one included, as last read."""
    samples_accumulated: int
    """Samples of all ranks towards the next global step, or in one that is being made."""
    is_stepping: bool
    """Whether a global step is being made in the background; see ``delay``."""
    samples_per_second: float
    """The speed of all ranks together, without the time spent in rounds."""
    last_contribution: int
    """Samples of all ranks in the current global step."""

    def __init__(
        self,
        optimizer: OptimizerMaker,
        *,
        peer: BlockingPeer | None,
        params: Iterable[Any] | None = None,
        batch_size_per_step: int | None = None,
        buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
        extra_tensors: Mapping[str, torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        self._ranks = Ranks()
        buffers = list(buffers) if buffers is not None else None
        extra = [*(buffers or ()), *(extra_tensors or {}).items()]
        inner = self._fitting(peer, optimizer, params, extra)
        super().__init__(inner)
        self.leader: Optimizer | None = None
        # the model's own parameters, as the optimizer may work on copies on the host
        parameters = parameters_of(inner)
        self._shards = Shards(self._ranks, parameters) if any(map(is_sharded, parameters)) else None
        self._tensors = [*(parameters if self._shards is None else ()), *(tensor for _, tensor in extra)]
        self._batch_size_per_step = batch_size_per_step
        self._has_warned = False
        self._mode = ""  # of the wrapped optimizer on rank 0
        # global steps, loads and inner steps that led to the parameters of all ranks; None if these may differ
        self._shared: tuple[int, int, int] | None = None

        def begin(_: Sequence[StepArguments]) -> None:
            assert peer is not None
            make = Optimizer if self._shards is None else functools.partial(ShardedOptimizer, shards=self._shards)
            self.leader = make(
                self.inner, peer=peer, batch_size_per_step=batch_size_per_step, buffers=buffers,
                extra_tensors=extra_tensors, **options,
            )  # fmt: skip

        self._together("begin", begin)

    @with_advice(grad_scaler="scaler.step(optimizer) with a torch.amp.GradScaler")
    def step(
        self, closure: Callable[[], Any] | None = None, *, batch_size: int | None = None, weight: float | None = None
    ) -> Any:
        """Add the current gradients; when the run has the samples of its target, make a global step with the others.

        Args:
            closure: computes the loss and its gradients again, and returns the loss.
            batch_size: number of this rank's samples behind the current gradients; it may differ between ranks.
            weight: the number of items over which this rank's loss is a mean, if not samples; on all ranks or on none.
        Raises:
            ConfigError: no batch size was given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own = StepArguments(*self._batch_of(batch_size, weight, self._batch_size_per_step))
        self._together("step", self._step, own)
        return loss

    def settle(self, timeout_s: float = 120.0) -> None:
        """Wait until no step is being made in the background, and all ranks have the result of the last one.

        Raises:
            Timeout: it took longer; other ranks raise Unavailable.
        """
        self._together("settle", lambda _: self._own_leader.settle(timeout_s))

    def wait_for_others(self, timeout_s: float = 30.0) -> bool:
        """Wait until all peers of the run have reached this step, so that those behind can still load the state.

        Returns whether they have, within ``timeout_s`` seconds.
        """
        return bool(self._together("wait_for_others", lambda _: self._own_leader.wait_for_others(timeout_s)))

    def state_digest(self) -> str:
        """BLAKE3 of parameters, optimizer and scheduler state of rank 0, in hexadecimal."""
        return str(self._together("state_digest", lambda _: self._own_leader.state_digest()))

    def close(self) -> None:
        """Leave the run; the peer stays open. Closing the peer does this too. Does nothing on ranks other than 0."""
        if self.leader is not None:
            self.leader.close()

    @property
    def makes_local_steps(self) -> bool:
        """Whether each call of :meth:`step` changes the parameters of this peer; False on ranks other than 0."""
        return self.leader is not None and self.leader.makes_local_steps

    def state_dict(self) -> dict[str, Any]:
        """On rank 0, the state as in :class:`manyhands.Optimizer`; on the other ranks there is none.

        Rank 0 may call this alone, unless FSDP2 has split the model. With ``delay``, call :meth:`settle` before it on
        all ranks.
        """
        if self._shards is not None:  # bring the whole copy up to date
            self._together("state_dict", lambda _: self._own_leader.settle_and_take_over())
        return self.inner.state_dict() if self.leader is None else self.leader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state given to rank 0, after the user has loaded the parameters into the model there.

        The other ranks get the parameters of rank 0. With FSDP2, load the parameters on all ranks.
        """
        self._shared, self._mode = None, ""
        self._together("load_state_dict", lambda _: self._own_leader.load_state_dict(state_dict))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the wrapped optimizer on rank 0; all ranks call this, and get the result and parameters."""
        if name == self._mode:
            return None
        self._shared = None
        result = self._together(name, lambda _: getattr(self._own_leader, name)(*args, **kwargs))
        self._mode = name if name in MODES else self._mode
        return result

    # on rank 0

    @property
    def _own_leader(self) -> Optimizer:
        assert self.leader is not None, "only rank 0 acts"
        return self.leader

    def _step(self, batches: Sequence[StepArguments]) -> None:
        leader = self._own_leader
        samples, weight = added_up(batches)
        if samples is not None and not self._has_warned and (hint := unequal(batches)):
            self._has_warned = True
            logger.warning("%s", hint)
        for name in ("grad_scale", "found_inf"):  # a GradScaler has set these attributes
            if hasattr(self, name):
                setattr(leader, name, getattr(self, name))
        try:
            leader.step(batch_size=samples, weight=weight)
        finally:
            for name in ("grad_scale", "found_inf"):
                vars(leader).pop(name, None)

    def _lead(self, action: Callable[[Sequence[StepArguments]], Any], batches: Sequence[StepArguments]) -> CallOutcome:
        try:
            with self._shards.leading() if self._shards is not None else nullcontext():
                result, leader = action(batches), self._own_leader
            figures = {name: getattr(leader, name) for name in FIGURES} | {"statistics": replace(leader.statistics)}
            num_inner = leader.statistics.samples_computed if leader.makes_local_steps else 0
            before = self._shared
            self._shared = leader.global_step, leader.statistics.states_loaded, num_inner
            options = hyper_parameters_of(leader.param_groups) if before != self._shared else None
            return CallOutcome(None, result, figures, options)
        except BaseException as error:  # all other ranks raise it, too
            self._shared = None  # it is unknown which parameters the ranks have
            if self._shards is not None and self._shards.is_moving:
                self._ranks.abandon()  # the others wait for the next shard, not for a result
                raise
            kind = next((kind for kind in (ConfigError, Unavailable) if isinstance(error, kind)), RankLost)
            try:
                text = repr(error) if kind is RankLost else str(error)
                self._ranks.broadcast(CallOutcome(kind(f"rank 0 failed: {text}")))
            except RankLost as lost:
                logger.warning("%s", lost)
            raise

    # on all ranks

    def _together(
        self, call: str, action: Callable[[Sequence[StepArguments]], Any], own: StepArguments | None = None
    ) -> Any:
        """Have rank 0 carry out an action; all ranks get its result, and rank 0's parameters if they have changed.

        Args:
            call: name of the method that all ranks must have called.
            action: gets the arguments of all ranks.
            own: this rank's arguments to ``step``.
        """
        said = self._ranks.gather((call, own))
        if any(other != call for other, _ in said):
            names = ", ".join(f"rank {rank} {other}" for rank, (other, _) in enumerate(said))
            raise ConfigError(f"all ranks must make the same calls; here: {names}")
        led = self._lead(action, [batch for _, batch in said]) if self._ranks.rank == 0 else None
        while isinstance(outcome := self._ranks.broadcast(led), Request):
            assert self._shards is not None, "rank 0 has shards, too"
            self._shards.follow(outcome)
        if outcome.error is not None:
            raise outcome.error
        vars(self).update(outcome.figures)
        if outcome.options is not None:
            self._ranks.share(self._tensors)
        if self.leader is not None:
            self.param_groups, self.state = self.leader.param_groups, self.leader.state
        else:
            for group, sent in zip(self.param_groups, outcome.options or [], strict=False):
                group.update(merged({name: value for name, value in group.items() if name != "params"}, sent))
        return outcome.result

    def _fitting(
        self,
        peer: BlockingPeer | None,
        optimizer: OptimizerMaker,
        params: Iterable[Any] | None,
        extra: Sequence[tuple[str, torch.Tensor]],
    ) -> torch.optim.Optimizer:
        """The optimizer to wrap; raises ``ConfigError`` on all ranks if they do not fit together."""
        rank = self._ranks.rank
        problem = ""
        specs: list[ParameterSpec] = []
        try:
            if rank == 0 and peer is None:
                raise ConfigError("it needs a peer: give it peer=manyhands.Peer(...)")
            if rank != 0 and peer is not None:
                raise ConfigError(
                    "it has a peer of its own, but rank 0 is the peer of all ranks: give peer=None on the others"
                )
            inner = made_optimizer(optimizer, params)
            named = checked_parameters(inner, may_be_sharded=True)
            if any(hasattr(parameter, "_is_flat_param") for parameter in parameters_of(inner)):
                raise ConfigError(
                    "the parameters are a part of the model (the first FSDP), which is not supported: split the model "
                    "with torch.distributed.fsdp.fully_shard (FSDP2), or wrap it in "
                    "torch.nn.parallel.DistributedDataParallel"
                )
            if any(is_sharded(parameter) for _, parameter in named):
                check_shards(named, self._ranks.num_ranks)
                if inner.state:
                    raise ConfigError(
                        "the optimizer has a state, which is split over the ranks (FSDP2): give a new optimizer, and "
                        "load a state with optimizer.load_state_dict() after that"
                    )
            if sharded := [name for name, tensor in extra if is_sharded(tensor)]:
                raise ConfigError(f"{sharded[0]} is a DTensor, and only parameters can be split: leave it out")
            specs = [*specs_of(inner), *(spec_of(name, tensor) for name, tensor in extra)]
        except ConfigError as error:  # raised below, on all ranks
            problem = f"on rank {rank}: {error}"
        found = self._ranks.gather((problem, specs))
        for other, (its_problem, its_specs) in enumerate(found):
            if its_problem:
                raise ConfigError(its_problem)
            if its_specs != found[0][1]:
                raise ConfigError(f"rank {other} has other parameters than rank 0; all ranks need the same whole model")
        return inner
