"""The training thread's blocking calls to the network thread, and their timeouts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from manyhands.averaging.state.content import State
from manyhands.averaging.timing import DAY_S, DIAL_S, JOIN_S, LOOK_S, MINUTE_S, MOMENT_S, RECORD_S, STALL_S
from manyhands.base.errors import ConfigError, RoundAborted, RunNotFound, Timeout, Unavailable
from manyhands.base.tracebacks import clear_tracebacks
from manyhands.optim.health import Health
from manyhands.optim.options import Options
from manyhands.optim.run.collaboration import Collaboration
from manyhands.optim.run.run_machine import Decide, Decision
from manyhands.optim.run.step_rounds import longest_attempt_s
from manyhands.optim.speed import SpeedMeter
from manyhands.optim.state.catching_up import MissedStep
from manyhands.optim.step.global_step import GlobalStep
from manyhands.optim.step.replica import Replica
from manyhands.peer import BlockingPeer
from manyhands.rpc.frames import readable
from manyhands.runtime.exit_delay import delay_exit, is_hurried
from manyhands.runtime.interrupts import uninterrupted

T = TypeVar("T")
logger = logging.getLogger(__name__)


class BlockingRunClient:
    """Calls one peer's :class:`.Collaboration` on the network thread, for the thread that trains its replica.

    Each call blocks until the network thread has answered, or raises ``Timeout``. The methods raise ``ConfigError`` if
    the peer was closed.
    """

    def __init__(self, peer: BlockingPeer, collaboration: Collaboration, replica: Replica) -> None:
        self._peer = peer
        self._collaboration = collaboration
        self._replica = replica
        self._averaging = collaboration.averaging
        self._report_at = 0.0  # when the next report during a step in the background is due

    @property
    def can_be_dialled(self) -> bool:
        """Whether this peer accepts connections: it is not in client mode."""
        return not self._collaboration.presence.endpoint.client_mode

    def join(self, options: Options) -> bool:
        """Join the run, and load its state if there is one; returns whether a state was loaded.

        Raises:
            ConfigError, ManifestMismatch, RunNotFound, Unavailable: see :class:`manyhands.Optimizer`.
        """
        self._run(self._collaboration.start(), "joining the run", RECORD_S)
        try:
            options.check_peers(self._call("joining the run", self._collaboration.tracker.num_peers))
            has_loaded = self._catch_up()
            if not has_loaded:
                self.moved_elsewhere()
            self._call("joining the run", self._collaboration.has_joined)
        except BaseException:
            self.leave()
            raise
        return has_loaded

    def _catch_up(self) -> bool:
        """Load the state of the best branch, and replay the steps since; returns whether a state was loaded.

        After a failure it tries again for ``JOIN_S`` seconds.
        """
        first_failure: Unavailable | None = None
        give_up_at = math.inf
        has_loaded = False
        phase = "joining the run"
        collaboration = self._collaboration
        tracker = collaboration.tracker
        while not self._call(phase, collaboration.may_go_on_from_here):
            if self._call(phase, collaboration.must_be_called_on):
                self._call(phase, tracker.start)  # publishes the addresses at which clients can connect
            try:
                self._run(collaboration.choose_branch(), phase, DAY_S)
                if self._call(phase, collaboration.may_go_on_from_here):
                    break
                state = self.download()
                with self.checking(state), uninterrupted():
                    self._replica.restore(state)
                self.moved_elsewhere(state)
                has_loaded = True
                self._run(tracker.look(for_place=True), phase)
                for step in self.missed_steps():
                    self._replica.replay(step)
            except Unavailable as error:
                if first_failure is None:
                    first_failure = error
                    # by then this peer's link may be up again, or a client with the state may have connected to it
                    give_up_at = self._peer.time() + JOIN_S
            else:
                return True
            if refusal := self._call(phase, tracker.branches.refusal):
                raise Unavailable(refusal)
            if first_failure is not None and self._peer.time() >= give_up_at:
                if self._call(phase, tracker.is_on_best_branch):  # no peer with a state is left
                    if collaboration.start_new is False:
                        raise RunNotFound(self._call(phase, collaboration.no_state)) from first_failure
                    break  # the user may load a checkpoint; otherwise this peer waits for one with the state
                raise first_failure  # the first one names most peers: later attempts skip those without a new record
            self._peer.sleep(MOMENT_S)  # the others may publish something new
            self._run(tracker.look(for_place=True), phase)
        return has_loaded

    def leave(self) -> None:
        """Leave the run; the peer stays. Does nothing if the peer was closed, as it has left the run then."""
        try:
            self._run(self._collaboration.close(), "leaving the run")
        except Timeout as error:
            logger.warning("%s; the others may wait for this peer until its record has expired", error)
        except ConfigError as error:
            logger.debug("%s", error)

    def health(self) -> Health:
        """This peer's health report."""
        return self._call("looking how this peer does", self._collaboration.health)

    def wait_for_others(self, timeout_s: float) -> bool:
        """Wait until all peers have reached this peer's global step; returns whether they have, within the timeout."""
        deadline = self._peer.time() + timeout_s
        num_looks = 0  # in a row, at which no other peer needed this one
        tracker = self._collaboration.tracker
        tracker.is_busy = True
        try:
            while num_looks < 2:
                is_waited_for = self._run(self._collaboration.is_waited_for(), "looking at the others")
                num_looks = 0 if is_waited_for else num_looks + 1
                if is_waited_for and self._peer.time() > deadline:
                    return False
                self._peer.sleep(LOOK_S)
        finally:
            tracker.is_busy = False
        return True

    def wait_for_downloads(self, timeout_s: float) -> bool:
        """Wait until no newcomer downloads the state from this peer; returns whether none does, within the timeout.

        A second signal to exit, such as Ctrl-C, ends the wait.
        """
        deadline, has_told = self._peer.time() + timeout_s, False
        with delay_exit(timeout_s):
            while followers := self._call("looking who downloads the state", self._collaboration.followers):
                if self._peer.time() >= deadline or is_hurried.is_set():
                    logger.warning("Leaving, but the state is still being downloaded by peer %s", ", ".join(followers))
                    return False
                if not has_told:
                    has_told = True
                    logger.info(
                        "Peer %s downloads the state from this one: leaving when it has it, in %.0f s at the latest; "
                        "Ctrl-C again leaves at once", ", ".join(followers), timeout_s,
                    )  # fmt: skip
                self._peer.sleep(LOOK_S)
        return True

    # after a micro-batch

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Turn a ``Timeout`` into a warning: after the network thread was blocked, training goes on."""
        try:
            yield
        except Timeout as error:
            logger.warning("%s; going on with the next batch. Is this machine overloaded, or was it asleep?", error)

    def decide(self, samples: int, speed: SpeedMeter, *, may_wait: bool) -> Decide:
        """Report what this peer has accumulated; returns what to do next."""
        collaboration = self._collaboration
        if not collaboration.is_lull(self._peer.time()):
            deciding = collaboration.decide(samples, speed.samples_per_second, speed.batch_s, may_wait=may_wait)
            with self._going_on():
                return self._run(deciding, "deciding", STALL_S + self._averaging.matchmaking_time_s)
        return Decide(Decision.ACCUMULATE)

    def rest(self, seconds: float) -> None:
        """Sleep for so many seconds, or until a step becomes due."""
        with self._going_on():
            self._run(self._collaboration.rest(seconds), "resting")

    def report(self, samples: int, speed: SpeedMeter, step: GlobalStep) -> None:
        """Report what this peer has accumulated while a step is made in the background, at most every ``LOOK_S``."""
        if self._peer.time() >= self._report_at:
            self._report_at = self._peer.time() + LOOK_S
            with self._going_on():
                self._call("reporting", self._report, samples, speed, step)

    def _report(self, samples: int, speed: SpeedMeter, step: GlobalStep) -> None:
        step.waiting = samples
        if step.has_moved:
            self._collaboration.tracker.report(samples, speed.samples_per_second, speed.batch_s)
        else:  # the batches since then count in the next step
            self._collaboration.tracker.report(step.contribution.samples, speed.samples_per_second)

    # a step

    def average(self, step: GlobalStep) -> None:
        """Make one attempt to average. After it the step has an outcome, or the error if that was caused by others."""
        timeout_s = longest_attempt_s(self._averaging) + DIAL_S  # it takes longer only if the network thread is blocked
        rounds = self._collaboration.step_rounds
        try:
            step.outcome = self._run(rounds.average(step.contribution), "averaging", timeout_s)
        except (RoundAborted, Unavailable) as error:
            step.error = clear_tracebacks(error)

    def leave_to_background(self, step: GlobalStep, within_s: float) -> None:
        """Have the network thread make a step, in the background; see :meth:`.GlobalStep.begin_in_background`."""
        self._report_at = self._peer.time() + LOOK_S
        self._call("beginning a step", step.begin_in_background, self._collaboration, within_s, timeout_s=MINUTE_S)

    def moved(self, step: GlobalStep) -> None:
        """Tell the network thread that a step was made, unless the peer was closed meanwhile."""
        with self._going_on(), suppress(ConfigError):
            self._call("moving on", step.announce, self._collaboration, timeout_s=MINUTE_S)

    def moved_elsewhere(self, state: State | None = None) -> None:
        """Tell the network thread this peer's position, when it begins there, or has loaded a state or a checkpoint."""
        moved, replica = self._collaboration.move_elsewhere, self._replica
        self._call("moving on", moved, replica.position, replica.lineage_samples, state, timeout_s=MINUTE_S)

    # the others' state

    def download(self) -> State:
        """Download the state of the leading branch of the run; raises ``Unavailable`` if no peer sends it."""
        started = self._peer.time()
        state = self._run(self._collaboration.download(), "downloading the state", DAY_S)
        logger.info("Received the state of step %d in %.2f s", state.header.position.step, self._peer.time() - started)
        return state

    @contextmanager
    def checking(self, state: State) -> Iterator[None]:
        """Within the block the caller loads a state. If it cannot be used, its donors are not asked again for a while.

        Raises:
            Unavailable: :meth:`manyhands.optim.step.replica.Replica.restore` has raised ``ValueError``.
        """
        try:
            yield
        except ValueError as error:
            reason = f"the state of peer {', '.join(state.donors)} cannot be used: {readable(str(error))}"
            for donor in state.donors:
                self._call("shunning a donor", self._collaboration.tracker.shun, donor, reason)
            raise Unavailable(f"{reason}; this peer does not ask there again for a while") from error

    def missed_steps(self) -> Iterator[MissedStep]:
        """The steps that the others have made from this peer's position on, as far as a peer has kept them.

        The caller must replay each step before it asks for the next one.
        """
        collaboration = self._collaboration
        phase = "fetching a step that this peer missed"
        while step := self._run(collaboration.missed_step(), phase, DAY_S):
            yield step
            replica = self._replica
            place = replica.position, replica.lineage_samples, replica.sketch()
            self._call("moving on", collaboration.replayed, *place, timeout_s=MINUTE_S)
            logger.info("Made a step that this peer had missed: step %d", replica.position.step)
            self._run(collaboration.tracker.look(for_place=True), phase)

    def _call(self, phase: str, function: Callable[..., T], *args: Any, timeout_s: float = STALL_S) -> T:
        """Call a function on the network thread."""

        async def call() -> T:
            return function(*args)

        return self._run(call(), phase, timeout_s)

    def _run(self, coro: Coroutine[Any, Any, T], phase: str, timeout_s: float = STALL_S) -> T:
        return self._peer.run(coro, timeout_s, phase)
