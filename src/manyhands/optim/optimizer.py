"""A drop-in torch optimizer whose batch is the whole swarm."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position, RoundManifest
from manyhands.averaging.rounds import CommittedRound
from manyhands.base.errors import ConfigError, RoundAborted, Timeout, Unavailable
from manyhands.base.run_id import checked_run_id
from manyhands.optim.accumulator import GradientAccumulator
from manyhands.optim.collaboration import Collaboration, Decision, LocalState
from manyhands.optim.config import ProgressConfig
from manyhands.optim.plain import merged
from manyhands.optim.run_manifest import RunManifest
from manyhands.optim.schedule import describe
from manyhands.optim.speed import SpeedMeter
from manyhands.optim.state import (
    State,
    capture,
    digest_of,
    hyper_parameters_of,
    names_of,
    parameters_of,
    restore,
    sealed,
    specs_of,
)
from manyhands.optim.state_transfer import MAX_DOWNLOAD_S
from manyhands.peer import BlockingPeer
from manyhands.rpc.frames import readable

logger = logging.getLogger(__name__)

PROTOCOL = "manyhands/1"
CALL_TIMEOUT_S = 15.0
JOIN_ATTEMPTS = 3
WAIT_PERIOD_S = 0.25
TELL_ATTEMPTS = 4
FAILURES_UNTIL_ADVICE = 3


@dataclass
class Statistics:
    """Counts since this optimizer was made.

    Attributes:
        samples_computed: went through ``step`` on this peer.
        samples_used: of these, in committed global steps.
        samples_dropped: of these, thrown away because this peer loaded the state of another branch.
        rounds_committed, rounds_aborted: averaging rounds that this peer took part in.
        steps_alone: global steps made while nobody else was there.
        states_loaded: how often the state was downloaded.
    """

    samples_computed: int = 0
    samples_used: int = 0
    samples_dropped: int = 0
    rounds_committed: int = 0
    rounds_aborted: int = 0
    steps_alone: int = 0
    states_loaded: int = 0


class Optimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer, so that its batch is what all peers of a run compute together.

    Micro-batches are accumulated. Each time the peers together have reached ``target_batch_size`` samples, their
    gradients are averaged, weighted by samples, and every peer makes the same step.

    The loss must be a mean over the samples of a batch; then any split of samples over peers and batches gives the
    update of one process that saw them as one batch.

    Args:
        optimizer: any torch optimizer over the model's parameters.
        peer: this machine's presence in the swarm; the optimizer leaves the run when it is closed.
        run_id: name of the run, 1 to 64 characters without ``.``
        target_batch_size: samples of one global step, by all peers together.
        batch_size_per_step: samples behind each call of :meth:`step`; or give ``batch_size`` to each call.
        scheduler: a torch scheduler of ``optimizer``, or a function that makes one; stepped once for each global step.
        must_match: further facts that all peers must agree on, such as ``{"tokenizer": digest}``.
        averaging: times and sizes of the averaging rounds.
        progress: periods of the progress records.
    Raises:
        ConfigError: an argument breaks a rule.
        ManifestMismatch: the model or the settings differ from those of the run; it names both.
        Unavailable: the DHT, or every peer that could hand out the state of the run, does not answer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        peer: BlockingPeer,
        run_id: str,
        target_batch_size: int,
        batch_size_per_step: int | None = None,
        scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        must_match: Mapping[str, str] | None = None,
        averaging: AveragingConfig | None = None,
        progress: ProgressConfig | None = None,
    ) -> None:
        checked_run_id(run_id)
        if target_batch_size < 1:
            raise ConfigError(f"target_batch_size={target_batch_size} must be at least 1; for example 4096")
        if batch_size_per_step is not None and batch_size_per_step < 1:
            raise ConfigError(f"batch_size_per_step={batch_size_per_step} must be at least 1; for example 32")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner = optimizer
        self._share_inner()
        self.scheduler = scheduler if isinstance(scheduler, LRScheduler) or scheduler is None else scheduler(optimizer)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "ReduceLROnPlateau follows each peer's own loss; give a schedule by global step, LambdaLR say"
            )
        self.statistics = Statistics()
        self.last_round: RoundManifest | None = None
        """The manifest of the round behind the current global step; None for a step made alone or loaded."""
        self.last_contribution = 0
        """This peer's samples in the current global step."""
        self._peer = peer
        self._batch_size_per_step = batch_size_per_step
        self._averaging = averaging or AveragingConfig()
        self._accumulator = GradientAccumulator([p for p in parameters_of(optimizer) if p.requires_grad])
        self._speed = SpeedMeter()
        self._failures = 0
        self._was_alone = False
        self._lineage_samples = 0
        self._state_lock = threading.Lock()  # held while parameters change, and while they are copied for a newcomer
        initial = hashlib.sha256(digest_of(specs_of(optimizer), b"", _on_cpu(parameters_of(optimizer)))).digest()
        self._local = LocalState(Position(0, initial), self._capture)
        manifest = self._manifest(run_id, target_batch_size, dict(must_match or {}))
        self._collaboration = Collaboration(
            peer.presence, manifest, self._local, self._averaging, progress or ProgressConfig()
        )
        self._join()

    @property
    def global_step(self) -> int:
        """Optimizer steps that the run has made, as far as this peer has followed."""
        return self._local.position.step

    @property
    def num_peers(self) -> int:
        """Peers at this peer's global step, with this one, as last read."""
        return self._collaboration.tracker.progress.num_peers

    @property
    def samples_accumulated(self) -> int:
        """This peer's samples towards the next global step."""
        return self._accumulator.samples

    @property
    def samples_per_second(self) -> float:
        """This peer's speed, without the time spent in rounds."""
        return self._speed.samples_per_second

    def state_digest(self) -> str:
        """SHA-256 of parameters, optimizer and scheduler state, in hexadecimal: equal on peers that are in step."""
        return self._capture().header.digest.hex()

    def step(self, closure: Callable[[], Any] | None = None, *, batch_size: int | None = None) -> Any:
        """Count the current gradients in; when the run is due for it, make a global step together with the others.

        Returns at once unless a global step is due. A failed attempt changes nothing: the gradients count in the next.

        Args:
            closure: computes the loss and its gradients again, and returns the loss.
            batch_size: samples behind the current gradients, instead of ``batch_size_per_step``; 0 adds nothing.
        Raises:
            ConfigError: no batch size was given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._accumulate(self._batch_size_per_step if batch_size is None else batch_size)
        decision = self._decide()
        if decision is Decision.LOAD_STATE:
            self._try_to_load_state()
        elif decision is Decision.AVERAGE:
            self._average()
        elif decision is Decision.GO_ALONE:
            self._step_alone()
        self._speed.resume(self._peer.time())
        return loss

    def wait_for_others(self, timeout_s: float = 30.0) -> bool:
        """Stay until all peers of the run have reached this step, so that those behind can still load the state.

        Returns whether they have, within ``timeout_s`` seconds.
        """
        deadline = self._peer.time() + timeout_s
        while self._run(self._collaboration.is_ahead_of_somebody(), "looking at the others"):
            if self._peer.time() > deadline:
                return False
            self._peer.sleep(WAIT_PERIOD_S)
        return True

    def close(self) -> None:
        """Leave the run; the peer stays. Closing the peer does this too."""
        self._run(self._collaboration.close(), "leaving the run")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the run is joined: all its peers must have the same parameters."""
        if hasattr(self, "_collaboration"):
            raise ConfigError("the parameters of a run are fixed; give all groups to the wrapped optimizer at first")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state on this peer."""
        self.inner.load_state_dict(state_dict)
        self._share_inner()

    def _share_inner(self) -> None:
        """Have the same groups and state as the wrapped optimizer, which replaces its own when it loads a state."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    # joining

    def _manifest(self, run_id: str, target_batch_size: int, extra: dict[str, str]) -> RunManifest:
        groups = hyper_parameters_of(self.inner)
        for group in groups:
            group.pop("param_names", None)  # they are in the tensors' specs
            group["lr"] = group.pop("initial_lr", group["lr"])
        named = zip(names_of(self.inner), parameters_of(self.inner), strict=True)
        return RunManifest(
            protocol=PROTOCOL,
            run_id=run_id,
            target_batch_size=target_batch_size,
            tensors=specs_of(self.inner),
            frozen=[name for name, parameter in named if not parameter.requires_grad],
            optimizer=type(self.inner).__name__,
            hyper_parameters=groups,
            scheduler=describe(self.scheduler),
            codec=self._averaging.codec,
            extra=extra,
        )

    def _join(self) -> None:
        self._run(self._collaboration.start(), "joining the run", CALL_TIMEOUT_S * 2)
        try:
            self._catch_up()
            self._run(self._collaboration.begin(self._local.position, self._lineage_samples), "joining the run")
        except BaseException:
            self.close()
            raise

    def _catch_up(self) -> None:
        failures = []
        while not self._run(self._collaboration.is_on_best_branch(), "joining the run"):
            try:
                self._load_state()
            except Unavailable as error:
                failures.append(error)
            else:
                return
            if len(failures) == JOIN_ATTEMPTS:
                raise failures[0]  # it names all who were asked; later attempts skip those without news
            self._run(self._collaboration.wait_for_news(), "joining the run")

    # global steps

    def _decide(self) -> Decision:
        try:
            decision: Decision = self._run(
                self._collaboration.decide(self._accumulator.samples, self._speed.samples_per_second), "deciding"
            )
        except Timeout as error:  # this machine was held up; training goes on
            logger.warning("%s; going on with the next batch", error)
            return Decision.ACCUMULATE
        return decision

    def _accumulate(self, samples: int | None) -> None:
        if samples is None or samples < 0:
            raise ConfigError(
                f"batch_size={samples}: step() needs to know how many samples are behind the gradients; "
                "give batch_size_per_step=32 to the optimizer, or batch_size=32 to step()"
            )
        if samples == 0:
            return
        self._speed.count(samples, self._peer.time())
        self.statistics.samples_computed += samples
        if not self._accumulator.add(samples):
            self.statistics.samples_dropped += samples
            logger.warning("a gradient of this micro-batch is not finite; its %d samples are dropped", samples)

    def _average(self) -> None:
        logger.info("Beginning global optimizer step #%d", self.global_step)
        weight = float(self._accumulator.samples)
        config = self._averaging  # the round bounds itself; this is for a network thread that is held up
        timeout_s = 2 * config.averaging_timeout_s + config.in_doubt_timeout_s + CALL_TIMEOUT_S
        try:
            result = self._run(self._collaboration.average(self._accumulator.mean(), weight), "averaging", timeout_s)
        except (RoundAborted, Unavailable) as error:
            self._attempt_failed(error)
            return
        self.statistics.rounds_committed += 1
        self._failures = 0
        if result.averaged_N is None:
            self._fall_behind(result)
            return
        self._was_alone = False
        logger.info("Averaged tensors successfully with %d peers", result.num_members)
        lineage = self._local.position.after(result.manifest).lineage
        self._apply(result.averaged_N, lineage, _samples_of(result.manifest), result.manifest)

    def _fall_behind(self, result: CommittedRound) -> None:
        """The samples of this peer are in the step that the others make; to follow them it needs their state."""
        logger.warning("The group averaged its tensors, but this peer lost the result and must load the state")
        self.statistics.samples_used += self._accumulator.samples
        self._accumulator.reset()
        position = self._local.position.after(result.manifest)
        lineage_samples = self._lineage_samples + _samples_of(result.manifest)
        others = [peer_id for peer_id in result.manifest.members if peer_id != self._peer.peer_id]
        self._tell(lambda: self._collaboration.fall_behind(position, lineage_samples, others))

    def _attempt_failed(self, error: Exception) -> None:
        self.statistics.rounds_aborted += 1
        self._failures += 1
        logger.warning("Skipped averaging: %s; the %d samples of this peer count in the next attempt",
                       error, self._accumulator.samples)  # fmt: skip
        if self._failures % FAILURES_UNTIL_ADVICE == 0:
            logger.warning(
                "%d attempts failed in a row: other peers of the run are seen, but no round with them succeeds. "
                "This peer does not step alone; check that it can reach them, and that they can reach it",
                self._failures,
            )

    def _step_alone(self) -> None:
        if not self._was_alone:
            logger.info("Found no active peers: this peer makes global steps alone, from #%d on", self.global_step)
        self._was_alone = True
        self.statistics.steps_alone += 1
        lineage = hashlib.sha256(self._local.position.lineage + b"alone" + self._peer.peer_id.encode()).digest()
        self._apply(self._accumulator.mean(), lineage, self._accumulator.samples, None)

    def _apply(self, averaged_N: torch.Tensor, lineage: bytes, samples: int, manifest: RoundManifest | None) -> None:
        with self._state_lock:
            with self._accumulator.gradients_from(averaged_N):
                self.inner.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self._lineage_samples += samples
            self._local.position = Position(self.global_step + 1, lineage)
        self.last_round, self.last_contribution = manifest, self._accumulator.samples
        self.statistics.samples_used += self.last_contribution
        self._accumulator.reset()
        members = manifest.members if manifest is not None else []
        self._tell(lambda: self._collaboration.move(self._local.position, self._lineage_samples, members))
        logger.info("Optimizer step: done!")

    # state

    def _capture(self) -> State:
        with self._state_lock:
            schedule = self.scheduler.state_dict() if self.scheduler is not None else {}
            state = capture(self.inner, schedule, self._local.position, self._lineage_samples)
        return sealed(state)

    def _try_to_load_state(self) -> None:
        logger.info("Peer is out of sync.")
        try:
            self._load_state()
        except Unavailable as error:
            logger.warning("%s; trying again after the next batch", error)
            return
        self._tell(lambda: self._collaboration.move(self._local.position, self._lineage_samples, []))

    def _load_state(self) -> None:
        started = self._peer.time()
        state = self._run(self._collaboration.download(), "downloading the state", MAX_DOWNLOAD_S)
        with self._state_lock:
            try:
                schedule = restore(state, self.inner)
            except ValueError as error:
                raise Unavailable(f"the state that was sent cannot be loaded: {readable(str(error))}") from error
            self._share_inner()
            if self.scheduler is not None:
                self.scheduler.load_state_dict(merged(self.scheduler.state_dict(), schedule))
            self._local.position = state.header.position
            self._lineage_samples = state.header.lineage_samples
        self.statistics.states_loaded += 1
        self.last_round, self.last_contribution = None, 0
        logger.info("Loaded the state of step %d in %.2f s", self.global_step, self._peer.time() - started)
        if self._accumulator.samples:
            self.statistics.samples_dropped += self._accumulator.samples
            logger.warning("%d samples computed on other parameters are dropped", self._accumulator.samples)
            self._accumulator.reset()

    def _tell(self, what: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have the network thread note something that has happened already; if it is held up, again."""
        for attempt in range(TELL_ATTEMPTS):
            try:
                self._run(what(), "moving on")
            except Timeout as error:
                if attempt + 1 == TELL_ATTEMPTS:
                    raise
                logger.warning("%s; trying again", error)
            else:
                return

    def _run(self, coro: Any, phase: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        return self._peer.run(coro, timeout_s, phase)


def _on_cpu(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().cpu().contiguous() for tensor in tensors]


def _samples_of(manifest: RoundManifest) -> int:
    return round(sum(manifest.weights))
