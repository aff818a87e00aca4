"""Averages a user's own tensors with other peers, without an optimizer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import torch

from manyhands.averaging.averager_loop import CLOSED, AveragerLoop
from manyhands.averaging.codecs import prepare_kernels
from manyhands.averaging.config import CENTERED_CLIP, AveragingConfig, averaging_of
from manyhands.averaging.grid.step import StepOutcome
from manyhands.averaging.messages import MAX_WEIGHT
from manyhands.averaging.state.content import LoadedState
from manyhands.averaging.tensor_list import TensorList
from manyhands.averaging.timing import DAY_S, DIAL_S, RECORD_S
from manyhands.base.arguments import check_flags, made_by, number_of
from manyhands.base.errors import ConfigError, ManyhandsError, Timeout
from manyhands.base.from_hivemind import FromHivemind, with_advice
from manyhands.base.identity import PeerId
from manyhands.base.run_id import checked_run_id
from manyhands.peer import BlockingPeer, check_peer
from manyhands.runtime.lost import close_when_lost

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundResult:
    """The outcome of :meth:`Averager.step`.

    Attributes:
        committed: whether the tensors hold the mean now; else they are untouched.
        reason: why it did not commit, in words; empty if it did. In a grid also why one of the rounds did not.
        round_id: id of the committed round, the same for all its members; empty without one.
        group: peer ids of the members, in the order of ranks; empty without a committed round.
        contributors: the members that gave values, each with its weight.
        cut: contributors whose values count in some parts only, as they were lost or left out during the round: start
            and stop of each part, in elements of the vector of all tensors in order.
        num_bytes_sent, num_bytes_received: values exchanged with the other members, all attempts together.
        seconds: spent in each phase, all attempts together: ``matchmaking``, ``averaging`` and ``vote``.
        num_rounds: rounds of the step: 1, but in a swarm larger than ``max_group_size`` one for each axis of the grid.
            There ``round_id`` and ``group`` are those of the last round that committed, and ``contributors`` are its
            members.
        num_rounds_committed: how many of these committed; if not all, the tensors hold the mean of a part of the swarm.
        disagreement: in a grid, the distance between the peers after the step before: the root mean square distance
            from their mean, as a fraction of its size, by what they published. None if unknown, or without a grid.
    """

    committed: bool
    reason: str
    round_id: str
    group: tuple[PeerId, ...]
    contributors: Mapping[PeerId, float]
    num_bytes_sent: int
    num_bytes_received: int
    seconds: Mapping[str, float]
    num_rounds: int = 1
    num_rounds_committed: int = 0
    disagreement: float | None = None
    cut: Mapping[PeerId, Sequence[tuple[int, int]]] = field(default_factory=dict)


class Averager(FromHivemind):
    """Averages a fixed list of tensors with the other peers under the same run id.

    ::

        with manyhands.Averager(model.parameters(), peer=peer, run_id="federated") as averager:
            for _ in range(100):
                train_for_a_while(model)
                result = averager.step(weight=num_samples)
            averager.wait_for_others()

    All members need lists of the same shapes, dtypes and kinds of device, in the same order. A peer in client mode
    takes part, and reduces for others only where all clients are connected to each other. Use the Averager as a context
    manager, or call :meth:`close`, or close the peer.

    Args:
        tensors: dense tensors of float16, bfloat16, float32 or float64 that share no memory, contiguous or not. The
            means are written into them; they keep dtype and device. They are summed in float32, and all of them in
            float64 if one of them is float64.
        peer: this machine's presence in the swarm; it serves one Averager for each run id, and one Optimizer.
        run_id: name of the run, 1 to 64 characters without ``.``
        auxiliary: reduce for others and get the mean, but contribute nothing.
        averaging: times and sizes of the rounds.
        matchmaking_time_s: as in ``averaging``: how long a step waits for expected peers.
    Raises:
        ConfigError: an argument breaks a rule, the peer averages under this run id already, or its ticket is for
            another run.
        ManifestMismatch: the tensors of the others differ; the error says whose, and how.
        Unavailable: the DHT does not answer in time.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        *,
        peer: BlockingPeer,
        run_id: str,
        auxiliary: bool = False,
        averaging: AveragingConfig | None = None,
        matchmaking_time_s: float | None = None,
    ) -> None:
        made_by(AveragingConfig, 'AveragingConfig(codec="int8")', averaging=averaging)
        check_flags(auxiliary=auxiliary)
        check_peer(peer)
        checked_run_id(run_id)
        self.auxiliary = auxiliary
        self._peer = peer
        self._tensors = TensorList(tensors)
        self._is_closed = False
        self._is_stepping = threading.Lock()
        config = averaging_of(averaging, matchmaking_time_s=matchmaking_time_s)
        if config.aggregate == CENTERED_CLIP:
            raise ConfigError(f"an Averager takes the mean, not aggregate={CENTERED_CLIP!r}: leave aggregate out")
        prepare_kernels(self._tensors.numel, config.codec)
        self._averager_loop = AveragerLoop(peer.presence, run_id, self._tensors, config)
        peer.run(self._averager_loop.start(), RECORD_S, "joining the averaging")
        close_when_lost(self, self._averager_loop.close_lost, self._averager_loop.loop)

    @property
    def num_peers(self) -> int:
        """Peers with matching tensors under this run id, this one included, as last read."""

        async def look() -> int:
            return self._averager_loop.tracker.num_peers()

        return self._peer.run(look(), DIAL_S, "counting the peers of the averager")

    @with_advice(
        timeout="timeout_s=",
        gather="peer.store() before the step and peer.get() after it",
        wait=": call step() in a thread to go on meanwhile",
        scheduled_time=": call step() when the values are ready",
        require_trigger=": call step() when the values are ready",
        allow_retries=": a step tries again until its timeout",
    )
    def step(self, weight: float = 1.0, timeout_s: float = 30.0) -> RoundResult:
        """Take part in the next round, and write the weighted mean into the tensors.

        Waits for expected peers, at most ``matchmaking_time_s`` and half of the time. If a member is lost, tries again
        while there is time. Each round is also limited by ``averaging_timeout_s``. Other threads must not change the
        tensors meanwhile.

        Args:
            weight: of this peer's values, such as the number of samples behind them; 0 takes part without contributing.
            timeout_s: seconds for the whole step. Members should use about the same.
        Raises:
            ConfigError: an argument breaks its rule, a value is not finite (it was not sent), or a tensor has been
                resized or freed, or this peer is banned from the run; no tensor was written.
            NothingToAverage: all members gave a weight of 0.
        """
        if not 0 <= number_of(weight) <= MAX_WEIGHT:
            raise ConfigError(f"weight={weight!r} must be a number from 0 to {MAX_WEIGHT:.0f}; for example 32.0")
        _check_timeout(timeout_s)
        with self._one_at_a_time():
            return self._step(0.0 if self.auxiliary else float(weight), float(timeout_s))

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._is_stepping.acquire(blocking=False):
            raise ConfigError("step() is running in another thread; an Averager takes one step at a time")
        try:
            if self._has_left:
                raise ConfigError(f"{CLOSED}; make another one")
            yield
        finally:
            self._is_stepping.release()

    def _step(self, weight: float, timeout_s: float) -> RoundResult:
        flat_N = self._tensors.values()
        if weight > 0:
            self._tensors.check_finite(flat_N)
        try:
            outcome = self._peer.run(
                self._averager_loop.step(flat_N, weight, timeout_s), timeout_s + DIAL_S, "averaging"
            )
        except Timeout as error:  # the network thread was blocked
            outcome = StepOutcome(reason=str(error))
        except ConfigError:
            if not self._has_left:
                raise
            outcome = StepOutcome(reason=CLOSED)  # the network thread ended before the step
        result = _result_of(outcome)
        if result.committed:
            assert outcome.committed is not None
            assert outcome.committed.averaged_N is not None
            self._tensors.assign(outcome.committed.averaged_N)
            self._averager_loop.position = self._averager_loop.reached
        return result

    @with_advice(timeout="timeout_s=", wait=": call it in a thread to go on meanwhile")
    def load_state_from_peers(self, timeout_s: float = DAY_S) -> LoadedState:
        """Take over the values of the peers that have made the most rounds, from several of them at once.

        A peer that begins late calls it before its first step. The others hand out what their tensors hold at that
        moment: a mean, and what their own code has made of it since. Nobody waits for this peer.

        Args:
            timeout_s: limit in seconds.
        Raises:
            ConfigError: this averager is closed, ``step()`` is running in another thread, or a tensor has been resized
                or freed.
            Unavailable: no other peer averages under this run id, or none could send its tensors. None was written.
            Timeout: it took longer than ``timeout_s``.
        """
        _check_timeout(timeout_s)
        with self._one_at_a_time():
            return self._peer.run(self._averager_loop.load(), float(timeout_s), "loading the others' tensors")

    def wait_for_others(self, timeout_s: float = 10.0) -> bool:
        """Wait until the other members of the last round hold its mean; call it before this peer leaves.

        A member may still be receiving the mean from this peer, and loses it if this peer leaves.

        Returns:
            Whether all of them hold it, or have left, in time; True if no round has committed.
        Raises:
            ConfigError: ``timeout_s`` is not a number above 0.
        """
        _check_timeout(timeout_s)
        if self._has_left:
            return False
        waiting = self._averager_loop.wait_for_others(float(timeout_s))
        try:
            return self._peer.run(waiting, timeout_s + DIAL_S, "waiting for the others of the last round")
        except Timeout as error:  # the network thread was blocked
            logger.warning("%s", error)
        except ConfigError as error:  # the peer was closed meanwhile
            logger.debug("%s", error)
        return False

    @property
    def _has_left(self) -> bool:
        """Whether this averager was closed, or its peer."""
        return self._is_closed or self._averager_loop.is_closed

    def close(self) -> None:
        """Leave the run; the peer stays. A step in another thread ends without a mean. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._peer.run(self._averager_loop.close(), DIAL_S, "leaving the averaging")
        except ManyhandsError as error:  # the peer was closed before, or its thread is blocked
            logger.debug("%s", error)

    def __enter__(self) -> Averager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_timeout(timeout_s: object) -> None:
    if not 0 < number_of(timeout_s) <= DAY_S:
        raise ConfigError(
            f"timeout_s={timeout_s!r} must be more than 0 and at most {DAY_S:.0f} seconds; for example 30.0"
        )


def _result_of(outcome: StepOutcome) -> RoundResult:
    meter = outcome.meter
    committed = outcome.committed
    reason = outcome.reason
    manifest = committed.manifest if committed is not None else None
    has_mean = committed is not None and committed.averaged_N is not None
    if committed is not None and not has_mean:
        reason = "the others hold the mean, but this peer lost it on the way"
    elif committed is not None and outcome.num_rounds == 1:
        reason = ""
    return RoundResult(
        committed=has_mean,
        reason=reason,
        round_id=manifest.group_id.hex() if manifest is not None else "",
        group=tuple(manifest.members) if manifest is not None else (),
        contributors=manifest.contributors() if manifest is not None else {},
        num_bytes_sent=meter.num_bytes_sent,
        num_bytes_received=meter.num_bytes_received,
        seconds={"matchmaking": meter.matchmaking_s, "averaging": meter.averaging_s, "vote": meter.vote_s},
        num_rounds=outcome.num_rounds,
        num_rounds_committed=outcome.num_rounds_committed,
        disagreement=outcome.disagreement,
        cut=manifest.cut() if manifest is not None else {},
    )
