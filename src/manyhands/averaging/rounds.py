"""One averaging round from start to finish: find a group, all-reduce, vote."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from manyhands.averaging.allreduce.bandwidth import RoundBandwidth, describe_slow_round, needed_s
from manyhands.averaging.allreduce.means import Means
from manyhands.averaging.allreduce.streams import PartnerStreams
from manyhands.averaging.codecs import INT4, INT8, NONE, Plan, Unsent, codec_named, codec_of_code, plan_of
from manyhands.averaging.config import CENTERED_CLIP, CLIP, MEAN, AveragingConfig
from manyhands.averaging.matchmaking.admission import chosen_codec
from manyhands.averaging.matchmaking.matchmaker import Matchmaker, Meeting
from manyhands.averaging.memory import Memory
from manyhands.averaging.messages import MAX_NORM, MAX_SUM_WEIGHT, Group, RoundManifest, Verdict
from manyhands.averaging.round.driver import Answers, RoundDriver
from manyhands.averaging.round.exchange import Contribution, Refill
from manyhands.averaging.round.limits import MemberLimits, limited, trusted, what_does_not_count
from manyhands.averaging.round.times import RoundTimes, is_pace_known
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.deadline import time_limit
from manyhands.base.errors import ConfigError, NothingToAverage, PeerError, RoundAborted, Timeout, TooSlow
from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint
from manyhands.runtime import TaskOwner
from manyhands.runtime.executor import run_to_end

logger = logging.getLogger(__name__)

Shapes: TypeAlias = Sequence[Sequence[int]]

BYTES_PER_MBIT = 125_000


@dataclass
class RoundMeter:
    """Adds up the bytes on the streams of a peer's attempts at a round, before encryption, and the seconds by phase."""

    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    matchmaking_s: float = 0.0
    averaging_s: float = 0.0
    vote_s: float = 0.0


@dataclass(frozen=True)
class CommittedRound:
    """A committed round.

    Attributes:
        averaged_N: the weighted mean, on the CPU, in the dtype of the vectors, bit-identical on all members. None if
            this member lacks the mean that most hold: it must get this step, or the state, from one of them.
        averaging_s: seconds from when the group had formed until this member held the mean, or knew that it does not.
        reason, blamed: what went wrong on the way, and because of which members; empty if nothing did.
        is_outsized: the others left out this peer's values, as they were not finite, or too large.
        usual_norm: median norm of the members' values; 0 without limits.
        means: the means as they were sent, in memory that later rounds overwrite; None if ``averaged_N`` is None.
        may_be_lacking: whether other members may lack the means, as a member was lost or left out.
    """

    averaged_N: torch.Tensor | None
    manifest: RoundManifest
    averaging_s: float
    reason: str = ""
    blamed: tuple[PeerId, ...] = ()
    is_outsized: bool = False
    usual_norm: float = 0.0
    means: Means | None = None
    may_be_lacking: bool = False


class RoundRunner:
    """Averages flat vectors with the other peers of one run.

    Args:
        run_id: one endpoint has one runner for each run.
        run_fingerprint: digest of the settings that all peers of the run share; a peer with another one is refused.
        meeting: says where and with whom the rounds are.
        limits: bounds on what one member can do to the mean, the same on all peers of the run; None for no bounds.

    Raises:
        ConfigError: this endpoint has a runner for this run.

    Attributes:
        matchmaker: finds the groups.
        memory: memory that only rounds need; it may be freed between rounds.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run_id: str,
        run_fingerprint: bytes,
        meeting: Meeting,
        config: AveragingConfig,
        rng: random.Random,
        limits: MemberLimits | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._endpoint = own = RunEndpoint(endpoint, run_id)
        self._config = config
        self._limits = limits
        try:
            self.matchmaker = Matchmaker(own, run_fingerprint, meeting, config, rng)
        except ConfigError as error:  # the endpoint already serves this run's methods
            raise ConfigError(
                f"this peer averages under run id {run_id!r} already, for an Optimizer or another Averager; close that "
                "one first, or take another run id, or a Peer of its own"
            ) from error
        self._tasks = TaskOwner("rounds")
        self._streams = PartnerStreams(own, config, self._tasks)
        self._answers = Answers(own, self.matchmaker)
        declared = config.bandwidth_mbit_s
        self._bandwidth = RoundBandwidth(declared * BYTES_PER_MBIT if declared is not None else None)
        self._meter = RoundMeter()  # of the current round
        self.memory = Memory()
        self._unsent: dict[int, Unsent] = {}  # by part of the vector, with a sparse codec
        self._num_limited = 0  # rounds in which this peer's weight or norm was over the limit

    def forget_unsent(self) -> None:
        """Drop what a sparse codec has not sent, as the parameters to which it belongs are gone."""
        self._unsent.clear()

    async def close(self) -> None:
        await self.matchmaker.close()
        await self._answers.close()
        self._streams.close()
        await self._tasks.close()

    async def average(
        self,
        flat_N: torch.Tensor,
        weight: float,
        *,
        shapes: Shapes | None = None,
        timeout_s: float = math.inf,
        gather_s: float | None = None,
        meter: RoundMeter | None = None,
        refill: Refill | None = None,
        part: int = 0,
        norm_before: float | None = None,
    ) -> CommittedRound:
        """Average ``flat_N`` over the group of the next round.

        Args:
            flat_N: finite float32 (or float64, on all members) on the CPU, contiguous. The caller must not change it
                before this returns. It is written only if there is a ``refill``.
            weight: samples behind the vector; a peer with weight 0 contributes nothing and gets the result.
            shapes: of the tensors in the vector, in order. Default: one tensor of one dimension, encoded without loss.
            timeout_s: limit of the search for a group and of the round together. By default the search has
                ``averaging_timeout_s``, and then the round again.
            gather_s: how long to wait for the expected peers, instead of ``matchmaking_time_s``.
            meter: counts what the round costs, also if it is aborted.
            refill: writes the values again. The means then overwrite ``flat_N``, which is undefined if the round is
                aborted. An exception from it ends the round for this peer.
            part: number of this vector, if several take turns: a sparse codec keeps apart what it did not send of each.
            norm_before: the usual norm of the values whose means are averaged here, 0 if this peer does not know it;
                None if the members bring values of their own.
        Raises:
            RoundAborted: no value was changed; the vector counts in the next attempt.
            NothingToAverage: likewise, because all members gave a weight of 0.
            TooSlow: likewise, as the lines are too slow; the reason says what to change, or what the next round does.
            ConfigError: the weight breaks its rule.
        """
        if not 0 <= weight <= MAX_SUM_WEIGHT:
            raise ConfigError(f"weight={weight} must be from 0 to {MAX_SUM_WEIGHT:.0f}; for example 32.0")
        self._meter = meter if meter is not None else RoundMeter()
        until = self._loop.time() + timeout_s
        shapes = shapes if shapes is not None else [flat_N.shape]
        clips = self._limits is not None and self._config.aggregate == CLIP and norm_before is None
        norm = await run_to_end(functools.partial(self._norm_of, flat_N, shapes, part)) if clips and weight > 0 else 0.0
        search_s = min(until - self._loop.time(), self._config.averaging_timeout_s)
        group = await self._find_group(weight, norm, gather_s, search_s, clips=clips)
        formed_at = self._loop.time()
        deadline = min(until, formed_at + self._config.averaging_timeout_s)
        contribution = self._contribution(group, flat_N, shapes, refill, part, norm_before, clips=clips)
        times = RoundTimes(group, contribution.rank, deadline, self.matchmaker.hurried(group.members))
        voters = self.matchmaker.voters(group.members)
        driver = RoundDriver(self._endpoint, self._streams, contribution, times, voters)
        could_reduce = group.members[contribution.rank].can_reduce
        unsent = contribution.unsent
        try:
            committed = await self._take_part(driver, contribution, formed_at)
            is_left_out = weight > 0 and self._endpoint.peer_id not in committed.manifest.contributors()
            if unsent is not None and not is_left_out:
                await run_to_end(unsent.commit)
        except RoundAborted as error:
            self._streams.drop_idle(member.peer_id for member in group.members)
            seconds = self._loop.time() - formed_at
            available_s = deadline - formed_at
            if driver.was_moving and is_pace_known(seconds, available_s) and not contribution.plan.passes_on:
                num_bytes = min(driver.num_bytes_sent, driver.num_bytes_received)
                rate = self._bandwidth.end_slow_round(num_bytes, seconds, could_reduce=could_reduce)
                if rate is not None:
                    said = self._slow_round(group, flat_N, shapes, rate, available_s)
                    raise TooSlow(f"{said}. The round ended because {error.reason}", error.blamed) from error
            if self._endpoint.peer_id in error.blamed:
                self._bandwidth.lose_round()
            raise
        finally:
            if unsent is not None:
                unsent.abort()
        if self._endpoint.peer_id in committed.blamed:
            self._bandwidth.lose_round()
        elif committed.averaged_N is not None:
            self._bandwidth.end_round(
                driver.num_bytes_sent, committed.averaging_s, driver.rate, could_reduce=could_reduce
            )
        return committed

    def _slow_round(self, group: Group, flat_N: torch.Tensor, shapes: Shapes, rate: float, available_s: float) -> str:
        """Say that the lines are too slow for a round, and what the next one takes or what to change."""
        num_peers = len(group.members)
        setting = self._config.codec
        numel = flat_N.numel()
        codec = codec_of_code(group.codec, setting)
        others = [member for member in group.members if member.peer_id != self._endpoint.peer_id]
        bandwidths = [self._bandwidth.bandwidth, *(member.bandwidth for member in others)]
        following = chosen_codec(setting, bandwidths, [self._endpoint.rtt_s(member.peer_id) for member in others])
        by_codec_s = {
            one.name: needed_s(plan_of(shapes, one, dtype=flat_N.dtype).num_bytes(0, numel), num_peers, rate)
            for one in (codec, following, INT8, INT4)
        }
        return describe_slow_round(
            num_bytes=numel * flat_N.element_size(),
            num_peers=num_peers,
            rate=rate,
            available_s=available_s,
            codec=codec.name,
            next_codec=following.name,
            by_codec_s=by_codec_s,
        )

    def _norm_of(self, flat_N: torch.Tensor, shapes: Shapes, part: int) -> float:
        """The norm of what this peer will send, without integers of buffers and the like.

        0 if a value is not finite: then nothing is sent.
        """
        codec = codec_named(self._config.codec) if self._config.is_sparse else NONE
        plan = plan_of(shapes, codec, dtype=flat_N.dtype)
        unsent = self._unsent_of(plan, part)
        norm = unsent.norm_of(flat_N) if unsent is not None else plan.norm(flat_N)
        return norm if norm <= MAX_NORM else 0.0

    def _unsent_of(self, plan: Plan, part: int) -> Unsent | None:
        """What was not sent of a part of the vector; None without a sparse codec."""
        if not plan.passes_on:
            return None
        unsent = self._unsent.get(part)
        if unsent is None or unsent.plan.segments != plan.segments:  # the first round
            self._unsent[part] = unsent = Unsent(plan)
        return unsent

    async def _find_group(
        self, weight: float, norm: float, gather_s: float | None, timeout_s: float, *, clips: bool
    ) -> Group:
        started = self._loop.time()
        try:
            async with time_limit(timeout_s, "looking for a group"):
                bandwidth = self._bandwidth.bandwidth
                may_reduce = self._bandwidth.may_reduce
                group = await self.matchmaker.find_group(weight, bandwidth, gather_s, may_reduce=may_reduce, norm=norm)
        except (Timeout, PeerError) as error:
            raise RoundAborted(str(error)) from error
        finally:
            self._meter.matchmaking_s += self._loop.time() - started
        if self._limits is None:
            return group
        counted = limited(group, self._limits, self.matchmaker.roster, clips=clips)
        own = next(one for one in counted.members if one.peer_id == self._endpoint.peer_id)
        self._tell(what_does_not_count(weight, own, self._limits))
        return counted

    def _tell(self, limited: str) -> None:
        """Log the first round in which this peer counts for less than it brings, the second, the fourth and so on."""
        self._num_limited += bool(limited)
        if limited and not self._num_limited & (self._num_limited - 1):
            logger.info("%s", limited)

    async def _take_part(self, driver: RoundDriver, contribution: Contribution, formed_at: float) -> CommittedRound:
        """Exchange values and vote in a formed group, until the round is decided."""
        group, rank = contribution.group, contribution.rank
        self._answers.begin(driver)
        verdict: Verdict | None = None
        try:
            verdict = await driver.run()
        finally:
            self._answers.end(driver)
            manifest = verdict.manifest if verdict is not None else None
            means = contribution.means if manifest is not None and contribution.manifest == manifest else None
            blamed = verdict.blamed if verdict is not None else ()
            self.matchmaker.round_over(group, blamed, is_committed=means is not None)
            self._meter.averaging_s += driver.exchanging_s
            self._meter.vote_s += driver.voting_s
            self._meter.num_bytes_sent += driver.num_bytes_sent
            self._meter.num_bytes_received += driver.num_bytes_received
        if manifest is None:
            if not any(member.weight > 0 for member in group.members):
                raise NothingToAverage(verdict.reason, verdict.blamed)
            raise RoundAborted(verdict.reason, verdict.blamed)
        is_left_out = group.members[rank].weight > 0 and not manifest.weights[rank] > 0
        return CommittedRound(
            averaged_N=means.averaged_N if means is not None else None,
            manifest=manifest,
            averaging_s=self._loop.time() - formed_at,
            reason=verdict.reason,
            blamed=tuple(verdict.blamed),
            is_outsized=is_left_out and rank in contribution.outsized,
            usual_norm=contribution.usual_norm,
            means=means,
            may_be_lacking=bool(verdict.blamed),
        )

    def _contribution(
        self,
        group: Group,
        flat_N: torch.Tensor,
        shapes: Shapes,
        refill: Refill | None,
        part: int,
        norm_before: float | None,
        *,
        clips: bool,
    ) -> Contribution:
        rank = group.rank_of(self._endpoint.peer_id)
        assert rank is not None
        plan = plan_of(shapes, codec_of_code(group.codec, self._config.codec), dtype=flat_N.dtype)
        assert plan.numel == flat_N.numel(), "the tensors of the run are those in the vector"
        return Contribution(
            group=group, rank=rank, flat_N=flat_N, plan=plan, refill=refill, memory=self.memory,
            unsent=self._unsent_of(plan, part), limits=self._limits,
            norm_before=None if self._config.aggregate == MEAN else norm_before,
            clips=clips, usual_of=trusted(group, self.matchmaker.roster),
            is_robust=self._limits is not None and self._config.aggregate == CENTERED_CLIP and norm_before is None,
        )  # fmt: skip
