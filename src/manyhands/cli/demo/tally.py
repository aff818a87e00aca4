"""State of the demo's run, computed from the events of its processes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from manyhands.monitor.monitor_events import Listening, MonitorEvent, ProgressMade
from manyhands.recipes.albert.trainer_events import BatchDone, Counts, Finished, Joined, StepDone, TrainerEvent

MEAN_FLIP = "mean-flip"
NOTHING_YET = Counts(0, 0, 0, 0, 0, 0)


class Summary(msgspec.Struct):
    """The outcome of the demo; written as JSON by ``--summary``.

    Attributes:
        steps: global steps at the end.
        peers_seen: trainers that took part, including the killed one and the newcomer.
        heldout_loss_first, heldout_loss_last: on the same held-out batch, before the first and after the last step.
        samples_computed, samples_used: by all trainers; used samples are those in committed global steps.
        samples_per_peer: peer id -> samples computed.
        rounds_committed: averaging rounds that changed the parameters.
        rounds_aborted: failed attempts, as counted by the trainer that saw most of them.
        bytes_sent_per_peer: peer id -> bytes, as far as reported.
        state_digest_per_peer: peer id -> digest at the end, of the surviving trainers.
        joined_late_samples: samples of the newcomer that were used.
        wall_s: from the start of the first process to the end of the last.
        liar: what became of the trainer that lies; None without one.
        problems: reasons for an exit code other than 0; empty when all is well.
    """

    steps: int
    peers_seen: int
    heldout_loss_first: float | None
    heldout_loss_last: float | None
    samples_computed: int
    samples_used: int
    samples_per_peer: dict[str, int]
    rounds_committed: int
    rounds_aborted: int
    bytes_sent_per_peer: dict[str, int]
    state_digest_per_peer: dict[str, str]
    joined_late_samples: int
    wall_s: float
    liar: LiarSummary | None
    problems: list[str]

    @property
    def has_learnt(self) -> bool:
        """Whether the held-out loss fell."""
        first = self.heldout_loss_first
        last = self.heldout_loss_last
        return first is not None and last is not None and last < first


class LiarSummary(msgspec.Struct):
    """What became of a trainer that lies.

    Attributes:
        noticed: global step -> names of the trainers that made this step without the liar.
        standings: global step -> "member" or "guest"; the steps after which it became that.
    """

    lie: str
    peer_id: str
    noticed: dict[int, list[str]]
    standings: dict[int, str]


@dataclass
class TrainerTally:
    """State of one trainer, from its events.

    Attributes:
        lie: what it does to the others; empty if it is honest.
        left_out: global step -> peers that were left out of the step.
        standings: global step -> "member" or "guest"; the steps after which it became that.
    """

    name: str
    is_newcomer: bool = False
    is_killed: bool = False
    lie: str = ""
    left_out: dict[int, list[str]] = field(default_factory=dict)
    standings: dict[int, str] = field(default_factory=dict)
    joined: Joined | None = None
    finished: Finished | None = None
    step: int = 0
    loss: float | None = None
    samples_per_second: float = 0.0
    counts: Counts = NOTHING_YET

    @property
    def peer_id(self) -> str:
        return self.joined.peer_id if self.joined is not None else ""

    @property
    def standing(self) -> str:
        """Its standing after its last step; empty before the first one."""
        return next(reversed(self.standings.values()), "")

    def apply(self, event: TrainerEvent) -> None:
        """Update the state with one event."""
        if isinstance(event, Joined):
            self.joined = event
            self.step = event.step
            return
        self.step = event.step
        self.counts = event.counts
        if isinstance(event, BatchDone):
            self.loss = event.loss
            self.samples_per_second = event.samples_per_second
        elif isinstance(event, StepDone):
            self.left_out[event.step] = event.left_out
            standing = "member" if event.is_member else "guest"
            if standing != self.standing:
                self.standings[event.step] = standing
        elif isinstance(event, Finished):
            self.finished = event


@dataclass
class Tally:
    """State of the whole demo, from the events of all processes.

    Attributes:
        page: address of the page; empty without one.
    """

    trainers: list[TrainerTally] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    page: str = ""
    progress: ProgressMade | None = None
    planned_steps: int = 0
    rounds: set[str] = field(default_factory=set)

    def apply_monitor(self, event: MonitorEvent) -> None:
        """Update the state with an event of the monitor."""
        if isinstance(event, Listening):
            self.addresses = event.addresses
        elif isinstance(event, ProgressMade):
            self.progress = event

    def apply_trainer(self, trainer: TrainerTally, event: TrainerEvent) -> None:
        """Update the state with an event of a trainer."""
        trainer.apply(event)
        if isinstance(event, StepDone) and event.round_id:
            self.rounds.add(event.round_id)

    @property
    def step(self) -> int:
        """The highest global step that any trainer has reached."""
        return max((trainer.step for trainer in self.trainers), default=0)

    @property
    def num_steps(self) -> int:
        """Expected global steps of the whole run; more than planned while the demo waits for the newcomer."""
        return max(self.planned_steps, self.step)

    @property
    def newcomer(self) -> TrainerTally | None:
        return next((trainer for trainer in self.trainers if trainer.is_newcomer), None)

    @property
    def has_newcomer_contributed(self) -> bool:
        return self.newcomer is not None and self.newcomer.counts.samples_used > 0

    @property
    def samples_computed(self) -> int:
        """Samples computed by all trainers so far."""
        return sum(trainer.counts.samples_computed for trainer in self.trainers)

    def alive(self) -> list[TrainerTally]:
        """Trainers that were not killed."""
        return [trainer for trainer in self.trainers if not trainer.is_killed]

    def honest(self) -> list[TrainerTally]:
        """Trainers that were not killed, and do not lie."""
        return [trainer for trainer in self.alive() if not trainer.lie]

    def _liar(self) -> LiarSummary | None:
        liar = next((trainer for trainer in self.trainers if trainer.lie), None)
        if liar is None:
            return None
        noticed: dict[int, list[str]] = {}
        for trainer in self.honest():
            for step, left_out in trainer.left_out.items():
                if liar.peer_id in left_out:
                    noticed.setdefault(step, []).append(trainer.name)
        return LiarSummary(liar.lie, liar.peer_id, dict(sorted(noticed.items())), liar.standings)

    def summary(self, wall_s: float, problem: str = "") -> Summary:
        """The summary; ``problem`` is the error that ended the demo early, if any."""
        seen = [trainer for trainer in self.trainers if trainer.joined is not None]
        first = next((t.joined.heldout_loss for t in seen if t.joined is not None and t.joined.step == 0), None)
        finished = [(trainer, trainer.finished) for trainer in self.honest() if trainer.finished is not None]
        summary = Summary(
            steps=self.step,
            peers_seen=len(seen),
            heldout_loss_first=first,
            heldout_loss_last=finished[0][1].heldout_loss if finished else None,
            samples_computed=self.samples_computed,
            samples_used=sum(trainer.counts.samples_used for trainer in seen),
            samples_per_peer={trainer.peer_id: trainer.counts.samples_computed for trainer in seen},
            rounds_committed=len(self.rounds),
            rounds_aborted=max((trainer.counts.rounds_aborted for trainer in seen), default=0),
            bytes_sent_per_peer={trainer.peer_id: trainer.counts.bytes_sent for trainer in seen},
            state_digest_per_peer={trainer.peer_id: end.state_digest for trainer, end in finished},
            joined_late_samples=self.newcomer.counts.samples_used if self.newcomer is not None else 0,
            wall_s=round(wall_s, 1),
            liar=self._liar(),
            problems=[],
        )
        if problem:
            summary.problems.append(problem)
        summary.problems += self._problems(summary)
        return summary

    def _problems(self, summary: Summary) -> list[str]:
        problems = [f"{trainer.name} did not finish" for trainer in self.honest() if trainer.finished is None]
        liar = summary.liar
        may_rise = liar is not None and liar.lie != MEAN_FLIP  # nobody can find out who reverses a gradient
        if not (summary.has_learnt or may_rise):
            first = summary.heldout_loss_first
            last = summary.heldout_loss_last
            problems.append(f"the held-out loss did not fall: {first} at first, {last} at last")
        if len(set(summary.state_digest_per_peer.values())) > 1:
            problems.append("the peers ended with different states")
        if liar is None and not summary.joined_late_samples:
            problems.append("the newcomer contributed nothing")
        if liar is not None and liar.lie == MEAN_FLIP and "guest" not in [*liar.standings.values()][1:]:
            problems.append("the liar kept its standing; give the others more --steps")
        return problems
