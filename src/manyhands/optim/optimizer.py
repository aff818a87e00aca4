"""A torch optimizer each of whose batches is computed by all peers of a run together."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from manyhands.averaging.codecs import prepare_kernels
from manyhands.averaging.config import AveragingConfig, averaging_of
from manyhands.averaging.messages import RoundManifest
from manyhands.averaging.state.content import sealed
from manyhands.averaging.timing import DIAL_S, LOG_S, LOOK_S, SOON_S
from manyhands.base.arguments import check_flags, made_by
from manyhands.base.errors import ConfigError, ManyhandsError, RoundAborted, Timeout, TooSlow, Unavailable
from manyhands.base.from_hivemind import with_advice
from manyhands.base.text import counted
from manyhands.optim.accumulator import Accumulator, GradientAccumulator
from manyhands.optim.blocking_client import BlockingRunClient
from manyhands.optim.config import ProgressConfig
from manyhands.optim.extra_tensors import ExtraTensors, extra_tensors_of
from manyhands.optim.health import Health
from manyhands.optim.local_steps import InnerSteps, LocalReplica, LocalSteps
from manyhands.optim.metrics import Failure, RecentSteps
from manyhands.optim.model_checks import LoopChecks, models_of, warn_of_running_statistics
from manyhands.optim.options import (
    Delay,
    OptimizerMaker,
    Options,
    SchedulerMaker,
    check_frozen,
    checked_batch,
    checked_parameters,
    made_optimizer,
    made_scheduler,
)
from manyhands.optim.rest_of_model import facts_of_rest, warn_of_rest
from manyhands.optim.run.collaboration import Collaboration
from manyhands.optim.run.progress import SHOWN_LIVE, Progress
from manyhands.optim.run.run_machine import Decide, Decision
from manyhands.optim.run.step_rounds import longest_attempt_s
from manyhands.optim.speed import Advice, SpeedMeter
from manyhands.optim.step.global_step import GlobalStep, SampleCounter, Statistics
from manyhands.optim.step.replica import Replica
from manyhands.optim.step.shards import ShardedAccumulator, Shards
from manyhands.optim.wrapper import PLACE, OptimizerWrapper
from manyhands.optim.wrapping import Wrapping, undone_if_it_raises
from manyhands.peer import BlockingPeer, check_peer
from manyhands.runtime.interrupts import uninterrupted
from manyhands.runtime.lost import close_when_lost

logger = logging.getLogger(__name__)

FAILURES_UNTIL_ADVICE = 3
"""Failed attempts in a row until there is advice: in a healthy run one or two fail when a member is lost."""

OVERWRITTEN = (
    "Something has written to the model's parameters while a step was made in the background (delay=%r). The step "
    "overwrites these changes: load weights only after optimizer.settle(), and change none in the loop; or leave "
    "delay out"
)


def _are_texts(facts: object) -> bool:
    return isinstance(facts, Mapping) and all(isinstance(text, str) for item in facts.items() for text in item)


class Optimizer(OptimizerWrapper):
    """Wraps a torch optimizer, so that all peers of a run compute each of its batches together.

    Each peer accumulates the gradients of its micro-batches. When the peers together have ``target_batch_size``
    samples, they average their gradients, weighted by samples, and every peer makes the same step.

    The loss must be a mean over the samples of a batch, or over the items that ``step(weight=...)`` counts. Then the
    update is that of one process with all these samples in one batch, however they are split over peers and
    micro-batches.

    Args:
        optimizer: any torch optimizer over the model's parameters, or a function that makes it from ``params``.
        params: parameters or groups, if ``optimizer`` is a function.
        peer: this machine's presence in the swarm. When the peer is closed, the optimizer leaves the run.
        run_id: name of the run, 1 to 64 characters without ``.``
        target_batch_size: samples of one global step, by all peers together.
        batch_size_per_step: samples behind each call of :meth:`step`; or give ``batch_size`` to each call.
        scheduler: a torch scheduler of ``optimizer``, or a function that makes one of it. It moves once for each global
            step.
        max_grad_norm: the averaged gradient is clipped to this norm, of all parameters together.
        matchmaking_time_s: as in ``averaging``.
        averaging_timeout_s: as in ``averaging``.
        delay: ``"optimizer"`` to make the update in the background, ``"gradients"`` to average there too, while the
            next batches are computed on parameters that are one step old. None for exact, synchronous steps.
        local_steps: for slow links: each peer makes steps alone, and once in ``target_batch_size`` samples of the run
            the peers average how their parameters have changed; see :class:`manyhands.LocalSteps`. ``max_grad_norm``
            then clips the gradient of each batch, and ``scheduler`` moves once in ``target_batch_size`` samples.
        offload: keep the optimizer state and float32 parameters on the host; the model's own parameters may have half
            precision. By default this is so only if ``delay`` is given, which needs it.
        auxiliary: this peer has no data, and only helps to average.
        allow_solo: if other peers are seen, but several rounds with them have failed in a row, go on alone instead of
            waiting. The run may split; when the branches meet again, the steps of one of them are lost, usually of the
            one with fewer steps (:mod:`manyhands.optim.run.branches`).
        start_new: whether to begin the run if none of the peers that ``peer`` has joined is in it. False refuses to, as
            the name may be mistyped, or the others may be gone. None begins it with a warning. True begins it, and also
            says that the run begins from the parameters of this peer, if it is still at step 0; otherwise the
            parameters of the peer that began it count. A run that was seen beyond step 0 is never begun anew: this peer
            waits for a peer that has its state.
        must_match: further facts that all peers must agree on, such as ``{"tokenizer": digest}``.
        model: the model, if the optimizer has only some of its parameters, as with a frozen base. The values of the
            other parameters are not sent, so all peers must have the same ones; this compares them.
        buffers: ``model.named_buffers()``, for a model with BatchNorm. With each global step all peers get the mean of
            their values, weighted by samples (for integers, the values of the peer with the most samples). Newcomers
            get them with the state.
        extra_tensors: further tensors of your own that are shared like buffers, by name.
        averaging: times and sizes of the averaging rounds.
        progress: periods of the progress records.
    Raises:
        ConfigError: an argument breaks a rule, or a parameter cannot be trained, or another Optimizer trains it.
        ManifestMismatch: the model or the settings differ from those of the run; names both.
        RunNotFound: see ``start_new``.
        Unavailable: the DHT, or every peer that could send the run's state, does not answer.
    """

    _step_supports_amp_scaling = True
    """Tells ``torch.amp.GradScaler`` that :meth:`step` divides by the scale itself, and drops overflowed gradients."""
    _shards: Shards | None = None
    """The model's shards, if the ranks of this peer have split it; see :class:`ShardedOptimizer`."""

    @undone_if_it_raises
    def __init__(
        self,
        optimizer: OptimizerMaker,
        *,
        peer: BlockingPeer,
        run_id: str,
        target_batch_size: int,
        params: Iterable[Any] | None = None,
        batch_size_per_step: int | None = None,
        scheduler: SchedulerMaker | None = None,
        max_grad_norm: float | None = None,
        matchmaking_time_s: float | None = None,
        averaging_timeout_s: float | None = None,
        delay: Delay | None = None,
        local_steps: LocalSteps | None = None,
        offload: bool | None = None,
        auxiliary: bool = False,
        allow_solo: bool = False,
        start_new: bool | None = None,
        must_match: Mapping[str, str] | None = None,
        model: torch.nn.Module | None = None,
        buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
        extra_tensors: Mapping[str, torch.Tensor] | None = None,
        averaging: AveragingConfig | None = None,
        progress: ProgressConfig | None = None,
    ) -> None:
        made_by(LocalSteps, "LocalSteps(fragments=4)", local_steps=local_steps)
        made_by(AveragingConfig, 'AveragingConfig(codec="int8")', averaging=averaging)
        made_by(ProgressConfig, "ProgressConfig(ttl_s=60.0)", progress=progress)
        check_flags(auxiliary=auxiliary, allow_solo=allow_solo)
        check_flags(may_be_none=True, offload=offload, start_new=start_new)
        if must_match is not None and not _are_texts(must_match):
            raise ConfigError(f'must_match={must_match!r} must be a dict of texts; for example {{"tokenizer": "v2"}}')
        self._options = options = Options(
            run_id=run_id, target_batch_size=target_batch_size, batch_size_per_step=batch_size_per_step,
            max_grad_norm=max_grad_norm, delay=delay, offload=offload,
            auxiliary=auxiliary, num_fragments=local_steps.fragments if local_steps is not None else None,
        )  # fmt: skip
        check_peer(peer)
        split = local_steps or LocalSteps()
        target_batch_size = options.target_batch_size // split.fragments  # a global step averages one fragment
        averaging = split.averaging(averaging_of(averaging, matchmaking_time_s, averaging_timeout_s))
        self._averaging = averaging
        super().__init__(made_optimizer(optimizer, params))
        # with the model's own parameters, not yet copies
        named = checked_parameters(self.inner, may_be_sharded=self._shards is not None)
        self._wrapping = Wrapping(self.inner, named, run_id, scheduler)
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        extra = extra_tensors_of(buffers, extra_tensors)
        parameters = [parameter for _, parameter in named]
        models = models_of(parameters) if not auxiliary and (buffers is None or model is None) else []
        if buffers is None:
            warn_of_running_statistics(models)
        if model is None:
            warn_of_rest(models, parameters)
        facts = facts_of_rest(model, parameters) | dict(must_match or {}) | options.facts()
        schedule = made_scheduler(scheduler, self.inner)
        of_replica: dict[str, Any] = {"max_grad_norm": max_grad_norm, "offload": options.offload, "extra": extra}
        self._local: InnerSteps | None = None
        if local_steps is None:
            replica = Replica(self.inner, schedule, shards=self._shards, **of_replica)
        else:
            replica = local = LocalReplica(self.inner, schedule, local_steps, **of_replica)
            self._local = InnerSteps(local)
            facts |= local_steps.facts(local.optimizer)
        self.wrap(replica)
        self.last_round: RoundManifest | None = None
        """The manifest of the round that led to the current global step; None if this peer made that step alone, or has
        loaded the state."""
        self.last_contribution = 0
        """This peer's samples in the current global step."""
        self.recent_steps = RecentSteps(peer.peer_id, split.fragments)
        """The last global steps that this peer has made, with the samples of each contributor."""
        self.weighs_by_samples: bool | None = None
        """Whether the weight of each batch so far was its number of samples; None before the first batch."""
        self.last_failure: Failure | None = None
        """The last time that samples of this peer did not count at once, and why; None if they always have."""
        self.peer = peer
        accumulator: Accumulator = self._local or self._new_accumulator(extra)
        self._samples = SampleCounter(peer.peer_id, self._replica, accumulator)
        self.statistics: Statistics = self._samples.statistics
        """Counts of this peer so far."""
        self._averages_in_background = options.delay == "gradients" or split.overlap_steps > 0
        self._current: GlobalStep | None = None  # the step being made; between calls of step(), in the background
        self._speed = SpeedMeter()
        self._advice = Advice(target_batch_size)
        self._allow_solo = allow_solo
        self._num_failures = 0  # failed attempts at a step, in a row
        self._told_failure_at = 0.0  # time of the last log line about one
        self._was_alone = self._has_checked_state = self._has_told_overwritten = False
        prepare_kernels(sum(parameter.numel() for parameter in self._replica.model_parameters), averaging.codec)
        self.manifest = manifest = self._replica.manifest(run_id, target_batch_size, averaging, facts)
        """The settings of the run, which each of its peers signs."""
        self._collaboration = Collaboration(
            peer.presence, manifest, self._replica, averaging, progress or ProgressConfig(),
            is_auxiliary=auxiliary, allow_solo=allow_solo, start_new=start_new,
        )  # fmt: skip
        self._client = BlockingRunClient(peer, self._collaboration, self._replica)
        self.statistics.states_loaded += self._client.join(options)
        self._checks = LoopChecks(self._replica.model_parameters)
        self._collaboration.on_leaving = functools.partial(_give_back, self._checks, replica, self._wrapping)
        self._wrapping.begin()
        close_when_lost(self, self._collaboration.close_lost, self._collaboration.loop)
        self._show()

    def _new_accumulator(self, extra: ExtraTensors) -> Accumulator:
        parameters = self._replica.model_parameters
        if self._shards is not None:
            return ShardedAccumulator(parameters, extra, self._shards)
        return GradientAccumulator(parameters, extra)

    @property
    def global_step(self) -> int:
        """Optimizer steps of the run that the model here has followed."""
        return self._shown_step

    @property
    def makes_local_steps(self) -> bool:
        """Whether each call of :meth:`step` changes the parameters of this peer; see ``local_steps``."""
        return self._local is not None

    @property
    def num_peers(self) -> int:
        """Number of peers at this peer's global step, this one included, as last read."""
        return self._collaboration.tracker.progress.num_peers

    @property
    def is_member(self) -> bool:
        """Whether this peer is a member of the run after its last step, and not a guest: members lead rounds and are
        waited for."""
        return self.peer.peer_id in self._replica.roster.members

    @property
    def health(self) -> Health:
        """This peer's health report: whether others read its records, it sees other peers, and its clock is right."""
        return self._client.health()

    @property
    def samples_accumulated(self) -> int:
        """This peer's samples towards the next global step, or in one that is being made."""
        current = self._current  # read once, as another thread may call this
        return self._samples.waiting + (current.contribution.samples if current is not None else 0)

    @property
    def is_stepping(self) -> bool:
        """Whether a global step is being made in the background; see ``delay``."""
        current = self._current
        return current is not None and not current.is_done

    @property
    def progress(self) -> Progress:
        """The predicted progress of all peers here towards the next global step; may be read from any thread."""
        return self._collaboration.tracker.outlook

    @property
    def samples_per_second(self) -> float:
        """This peer's speed, without the time spent in rounds."""
        return self._speed.samples_per_second

    def state_digest(self) -> str:
        """BLAKE3 of parameters, optimizer and scheduler state, in hexadecimal: equal on peers at the same position."""
        return sealed(self._replica.capture_agreed()).header.digest.hex()

    @with_advice(grad_scaler="scaler.step(optimizer) with a torch.amp.GradScaler")
    def step(
        self, closure: Callable[[], Any] | None = None, *, batch_size: int | None = None, weight: float | None = None
    ) -> Any:
        """Add the current gradients; when the run has the samples of its target, make a global step with the others.

        Returns soon unless a global step is due. A failed attempt changes nothing: the gradients count in the next one.
        ``.grad`` stays as it is.

        Args:
            closure: computes the loss and its gradients again, and returns the loss.
            batch_size: samples behind the current gradients, instead of ``batch_size_per_step``; 0 adds nothing.
            weight: the number of items over which the loss is a mean, if these are not samples: tokens, say.
        Raises:
            ConfigError: no batch size was given; with ``local_steps``, the target is below the first batch; a parameter
                that was frozen when the Optimizer was made requires grad; something other than ``scheduler`` has
                changed an option of the groups, such as the learning rate; the wrapped optimizer is in eval mode; no
                parameter has a gradient; accelerate accumulates gradients as well; or, after the first step, the
                optimizer's state has a value that newcomers could not load.
        """
        if self._replica.mode == "eval":
            raise ConfigError("the optimizer is in eval mode: call optimizer.train() before the next batch, as always")
        check_frozen(self._frozen)
        self._replica.check_options(is_stepping=self.is_stepping)
        self._checks.check_held()
        loss, at_step = None, self._shown_step
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_over()
        if self._current is not None and self._current.is_done:
            if self._replica.is_overwritten and not self._has_told_overwritten:
                self._has_told_overwritten = True
                logger.warning(OVERWRITTEN, self._options.delay)
            self._conclude(self._current)
        has_batch = self._accumulate(batch_size, weight, at_step)
        if self._current is not None and self._local is not None and self._local.must_wait:
            self.settle(longest_attempt_s(self._averaging) + DIAL_S)
        if self._current is None:
            may_wait = not self._averages_in_background
            self._act_on(self._client.decide(self._samples.waiting, self._speed, may_wait=may_wait))
        else:
            self._client.report(self._samples.waiting, self._speed, self._current)
        self._speed.resume(self.peer.time())
        if has_batch:
            self._checks.note_counted()
        return loss

    def settle(self, timeout_s: float = 120.0) -> None:
        """Wait until no step is being made in the background, and the model has the result of the last one.

        Raises:
            Timeout: that took longer than ``timeout_s`` seconds.
        """
        deadline = self.peer.time() + timeout_s
        while self._current is not None:
            if self._current.is_done:
                self._conclude(self._current, keeps_model=True)
            elif self.peer.time() > deadline:
                raise Timeout("waiting for a global step in the background", timeout_s)
            else:
                self.peer.sleep(SOON_S)

    @contextmanager
    def agreed_parameters(self) -> Iterator[None]:
        """Within the block, the model has the parameters that the peers agree on, for an evaluation or a checkpoint.

        That makes a difference only with ``local_steps``: after the block the model has this peer's own parameters
        again. Waits for a step in the background. Do not call :meth:`step` within the block.
        """
        self.settle()
        self._take_over()
        with self._replica.agreed_in_model():
            yield

    def wait_for_others(self, timeout_s: float = 30.0) -> bool:
        """Wait until all peers of the run have reached this peer's global step, so that they can still load its state.

        Returns whether they have reached it within ``timeout_s`` seconds.
        """
        return self._client.wait_for_others(timeout_s)

    def wait_for_downloads(self, timeout_s: float = 30.0) -> bool:
        """Wait until no peer downloads the state from this one any more, for a program that was told to end.

        Returns whether all of them have the state, within ``timeout_s`` seconds.
        """
        return self._client.wait_for_downloads(timeout_s)

    def close(self) -> None:
        """Leave the run; the peer stays open. The same happens if the peer is closed, or this is garbage-collected.

        Afterwards the wrapped optimizer is one of plain torch again, and may be wrapped again.
        """
        self._client.leave()

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer; under ``manyhands``, its position in the run and the schedule.

        Waits for a step in the background, so take the model's parameters for a checkpoint after this call.
        """
        self.settle_and_take_over()
        return super().state_dict()

    def settle_and_take_over(self) -> None:
        """Wait for a step in the background, and take over what the user's code has written to the model."""
        self.settle()
        self._take_over()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state on this peer, after you have loaded the parameters into the model.

        With the state of a :class:`manyhands.Optimizer`, the peer also moves to the position of that state in the run.
        If the run is further, the next :meth:`step` loads its state from the others, as always.
        """
        self.settle()
        with uninterrupted():
            self._take_over()
            is_here = self._replica.is_at(state_dict.get(PLACE))
            super().load_state_dict(state_dict)
            if is_here:
                return
            self._samples.drop_waiting("a checkpoint was loaded")
            self._moved_elsewhere()
        self._client.moved_elsewhere()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == self._replica.mode:  # nothing would change; a Trainer calls train() before each batch
            return None
        self.settle()
        with uninterrupted():
            result = self._replica.call(name, *args, **kwargs)
            self.share()
        return result

    def _take_over(self) -> None:
        """Take over what the user's code has written to the model, unless a step in the background overwrites it."""
        if self._local is not None:
            self._replica.take_over(is_ahead=self._local.is_ahead)
        elif self._current is None:
            self._replica.take_over()

    # micro-batches

    def _accumulate(self, batch_size: int | None, weight: float | None, at_step: int) -> bool:
        """Add the current ``.grad``; returns whether there was a batch."""
        if self._options.auxiliary:
            if batch_size or weight:
                raise ConfigError("an auxiliary peer has no batches: call step() without a batch size")
            self._client.rest(LOOK_S)
            return False
        batch_size, weight = self._batch_of(batch_size, weight, self._options.batch_size_per_step)
        samples = checked_batch(batch_size, weight)
        if samples == 0:
            return False
        if weight is None or weight > 0:
            self._checks.check_has_gradient()
        self._checks.check_kept()
        if not self.statistics.samples_computed:
            self._options.check_peers(1, samples)
        if advice := self._advice.after_batch(samples, self._options.target_batch_size):
            logger.warning("%s", advice)
        self.weighs_by_samples = self.weighs_by_samples is not False and weight in (None, samples)
        self._speed.count(samples, self.peer.time())
        # a GradScaler has set these attributes, if there is one
        scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        is_overflow = found_inf is not None and float(found_inf) > 0
        with uninterrupted():
            self._samples.add(samples, weight, 1.0 if scale is None else float(scale), at_step, is_overflow=is_overflow)
        return True

    # global steps

    def _act_on(self, decide: Decide) -> None:
        decision = decide.decision
        if decision is Decision.LOAD_STATE and self._replay():
            return
        if decision in (Decision.LOAD_STATE, Decision.RELOAD):
            self._load_state(is_reload=decision is Decision.RELOAD)
        elif decision is Decision.AVERAGE:
            has_had_enough = self._allow_solo and self._num_failures >= FAILURES_UNTIL_ADVICE
            self._make_step(is_alone=has_had_enough and self._samples.waiting > 0)
        elif decision is Decision.AVERAGE_WHEN_DUE:
            self._make_step(is_alone=False, within_s=decide.within_s)
        elif decision is Decision.GO_ALONE:
            self._make_step(is_alone=True)

    def _make_step(self, *, is_alone: bool, within_s: float = 0.0) -> None:
        """Make a global step, or begin it in the background. After an error or an interrupt it is concluded, too.

        Args:
            within_s: the target is not reached yet: the step waits so long for that, in the background.
        """
        if not is_alone:
            logger.info("Beginning global optimizer step #%d", self.global_step + 1, extra=SHOWN_LIVE)
        elif not self._was_alone:
            logger.info("Found no active peers: this peer makes global steps alone, from #%d on", self.global_step + 1)
        step = None
        try:
            with uninterrupted():
                step = self._current = GlobalStep(self._replica, self._samples.freeze())
            if is_alone:
                step.use_own_gradient(self.peer.peer_id, can_lead=self._client.can_be_dialled)
            elif not self._averages_in_background:
                self._client.average(step)
            if step.error is None and (step.outcome is None or self._options.delay is not None):
                self._client.leave_to_background(step, within_s)
                return
            if step.error is None:
                with uninterrupted():  # parameters, statistics and position move together
                    step.advance()
            self._conclude(step)
        except BaseException:
            if step is not None and self._current is step and not step.is_in_background:
                self._conclude(step)
            raise

    def _conclude(self, step: GlobalStep, *, keeps_model: bool = False) -> None:
        """Tell the network thread of a step that has ended, and count it.

        Args:
            keeps_model: if something else, such as a checkpoint, has written to the model since the step began, keep
                what was written instead of overwriting it with the result of the step.
        """
        try:
            if step.has_moved and not step.is_announced:
                self._client.moved(step)
        finally:
            self._count(step, keeps_model=keeps_model)

    @uninterrupted()
    def _count(self, step: GlobalStep, *, keeps_model: bool) -> None:
        """Count a step that has ended, and copy its parameters to the model; raises the error of a background step."""
        self._current = None
        self._samples.end(step)
        if not step.has_moved:
            if step.error is not None:
                self._note_failure(step.error)
            return
        self._num_failures = 0
        outcome = step.outcome
        number = step.left_from.step + 1
        counts = self.statistics
        assert outcome is not None
        self._was_alone = outcome.manifest is None
        counts.rounds_committed += not self._was_alone
        counts.steps_alone += self._was_alone
        counts.updates_refused += bool(step.refusal)
        counts.disagreement = outcome.disagreement
        counts.samples_of_all += outcome.samples
        shares = {} if step.refusal else outcome.shares
        roster = outcome.roster.digest() if self._was_alone else b""
        self.recent_steps.add(step.left_from, self._replica.position, shares, is_grid=outcome.is_in_grid, roster=roster)
        if outcome.is_left_out or step.refusal:
            self.last_failure = Failure(number, step.refusal or "the group made the step without its samples")
        if keeps_model and self._replica.is_overwritten:
            self._replica.take_over()
        else:
            self._replica.copy_to_model()
        self._show()
        self.last_round = outcome.manifest
        self.last_contribution = 0 if outcome.is_left_out else step.contribution.samples
        logger.info("Optimizer step: done! Step %d, %s", self.global_step, counts.summary())
        if not self._was_alone:
            speed = self._collaboration.tracker.progress.samples_per_second
            of_local = self._local.advice() if self._local is not None else ""
            for advice in filter(None, (self._advice.after_step(speed, outcome.averaging_s), of_local)):
                logger.warning("%s", advice)
            can_delay = self._options.delay is None and self._local is None and not self._options.auxiliary
            if can_delay and (advice := self._advice.of_waiting(self._speed.computed_s, self._speed.waited_s)):
                logger.info("%s", advice)
        if step.error is not None and not isinstance(step.error, ManyhandsError):  # raised by the background update
            raise step.error
        if not self._has_checked_state:
            self._has_checked_state = True
            self._replica.check_state()

    def _note_failure(self, error: BaseException) -> None:
        """Count and log a failed attempt, the same one once in ``LOG_S``. Raise the error if others did not cause it.

        Advice comes with failures that last. Even in a healthy run, several may come within a second: other peers see
        the record of a newcomer before that has computed a batch and comes to a round.
        """
        if not isinstance(error, (RoundAborted, Unavailable)):
            raise error
        self.statistics.rounds_aborted += 1
        self._num_failures += 1
        now = self.peer.time()
        goes_alone = self._allow_solo and self._num_failures == FAILURES_UNTIL_ADVICE
        has_lasted = now >= self._told_failure_at + LOG_S or goes_alone
        last, self.last_failure = self.last_failure, Failure(self._replica.position.step + 1, str(error))
        if self.last_failure == last and not has_lasted:
            return
        self._told_failure_at = now
        advice = ""
        if self._num_failures >= FAILURES_UNTIL_ADVICE and has_lasted and not isinstance(error, TooSlow):
            advice = (
                f". {self._num_failures} attempts failed in a row: other peers of the run are seen, but no round with "
                f"them succeeds. {'It goes on alone' if self._allow_solo else 'This peer does not step alone'}. One of "
                "them may no longer call step(), in a notebook say: end its program, or let it go on. Otherwise "
                "manyhands doctor --initial-peers ... says whether this peer can reach the others, and whether they "
                f"can reach this peer; see {error.entry}"
            )
        logger.log(
            logging.INFO if self._collaboration.tracker.last_said_goodbye else logging.WARNING,
            "Skipped averaging: %s; %s of this peer will wait for the next attempt%s",
            error,
            counted(self._samples.waiting, "sample"),
            advice,
        )

    def _load_state(self, *, is_reload: bool) -> None:
        """Download and load the state of the leading branch; a failure is logged, and :meth:`step` tries again."""
        before = self._replica.position
        logger.info("This peer is not in step with the run: downloading the state")
        try:
            state = self._client.download()
            with self._client.checking(state), uninterrupted():
                self._replica.restore(state)
                self.statistics.states_loaded += 1
                if is_reload:
                    self.statistics.parameters_reloaded += 1
                    number = self._replica.position.step
                    self.last_failure = Failure(number, "its parameters were not those of the majority")
                    self._samples.drop_waiting("they were computed on parameters that are not those of the run")
                else:
                    self._samples.load(before)
                self._moved_elsewhere()
            self._client.moved_elsewhere(state)
        except Unavailable as error:
            logger.warning("%s; trying again after the next batch", error)

    def _replay(self) -> bool:
        """Replay the steps that the others have made from this peer's position on; returns whether there were any."""
        position = self._replica.position
        for step in self._client.missed_steps():
            with uninterrupted():
                before = self._replica.position
                self._replica.replay(step)
                self._samples.load(before)
                self._moved_elsewhere()
        return self._replica.position != position

    def _moved_elsewhere(self) -> None:
        """Reset what describes the last step of this peer, as its parameters are not the result of that any more."""
        self.last_round, self.last_contribution = None, 0
        self.recent_steps.forget_from(self._replica.position.step + 1)
        self._show()

    def _show(self) -> None:
        self.share()
        self._shown_step = self._replica.position.step


def _give_back(checks: LoopChecks, replica: Replica, wrapping: Wrapping) -> None:
    """Make the wrapped optimizer one of plain torch again, as this peer has left the run."""
    checks.close()
    try:
        replica.release()
    finally:
        wrapping.end()
