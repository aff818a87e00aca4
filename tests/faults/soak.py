"""Up to ten real trainers, of which every second one is killed, stopped, made slow or set to a wrong time.

    python -m tests.faults.soak --minutes 30 --seed 1    # `make soak MINUTES=30 SEED=1`

Events come every 0.5 to 2 s, from the 15th second on: a process is killed, stopped for a while, interrupted or started,
or it gets a slow line or a wrong clock. They follow from the seed alone; what the peers make of them depends on the
machine. At any time at least three peers have run undisturbed for 15 s, so the state of the run is not lost. Peers that
have joined less than 15 s ago are killed and interrupted, too. The first two peers live to the end, so that what grows
slowly shows in them: they are stopped, made slow and set to a wrong time only. After the last event the peers get a
minute to agree; then each is interrupted. Their logs are in ``build/soak``.

It fails if a call of ``step()`` or a start takes more than a minute (without the time for which the process was
stopped), if a process ends by itself or outlives Ctrl-C by ten seconds, if tasks, files, threads or memory of a peer
grow, if a round is aborted without a reason, if more than 5% of the samples of the peers of the end count in no step,
if the loss does not fall, or if the peers do not agree in the end. On standard output, one JSON object:

    events              how many of each kind
    global_steps        number of the last step
    rounds, aborted     of all peers; ``reasons`` of those that were aborted, with their number; N stands for a number
    hangs, leaks, problems   lines, each a failure
    judged_for_growth   peers that have lived for a minute; the others are too young to see whether something grows. A
                        run that is long enough fails if there are fewer than two
    longest_life_s      of a peer
    longest_wait_s      in ``step()``, without the time for which the process was stopped
    loss_first, loss_last    of the first step, and the mean of the peers in the end
    samples_used_share  of those of the peers of the end, without the ones that waited for a step
    samples_used_share_of_all   the same of all peers that left by Ctrl-C
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tests.faults.soak_peer import Command, Facts, run

MAX_PEERS, MIN_RUNNING, FIRST_PEERS = 10, 3, 4
VETERANS = frozenset({0, 1})
"""Places of the peers that live to the end."""
LEAST_USED = 0.95
"""A peer that was stopped while most others were replaced believes the new ones only once the records of the dead ones
have expired, up to 30 s later (docs/figures.md#rounds-under-faults); what it computes until then is lost."""
GAP_S = (0.5, 2.0)
LAST_S = (2.0, 20.0)
"""A stop, a slow line or a wrong clock lasts so long."""
SETTLE_S = 15.0
"""After this long a peer that has joined, or that was disturbed, has the state on a machine with two cores."""
WRONG_S = (-3600.0, -90.0, -5.0, 5.0, 90.0, 3600.0)
BYTES_PER_S = (20e3, 100e3, 1e6)
WEIGHTS = {"kill": 3, "stop": 2, "leave": 2, "join": 6, "slow": 2, "clock": 2}
HANG_S = 60.0
AGREE_S = 60.0
LEAVE_S = 10.0
KILLED_BY = -int(signal.SIGKILL)
MIN_SHOWN = 60
"""Facts of a peer, one each second, before it is asked whether something grows."""
MAX_GROWTH = {"num_tasks": 20, "num_files": 40, "num_threads": 4, "memory_mb": 15.0}
"""Between the least of the second fifth of a peer's life and the least of the last; a file or two for each peer."""


LOGS = Path("build/soak")
VARYING = re.compile(r"(?P<PEER>12D3\w+)|(?P<ADDRESS>/ip[46]/\S+)|(?P<N>[0-9.]+)")
"""What differs from one aborted round to the next one with the same reason."""


# events


@dataclass(frozen=True)
class Event:
    """What happens to one of the places for peers.

    Attributes:
        at_s: seconds after the start.
        lasts_s: of a stop, a slow line or a wrong clock.
        amount: bytes per second of a slow line, seconds by which a clock is wrong.
    """

    at_s: float
    kind: str
    place: int
    lasts_s: float = 0.0
    amount: float = 0.0


def events(seed: int, seconds: float) -> Iterator[Event]:
    """Events in the order of their times; those of equal seeds are equal."""
    rng = random.Random(seed)
    for place in range(FIRST_PEERS):
        yield Event(0.0, "join", place)
    calm_at_s = dict.fromkeys(range(FIRST_PEERS), 0.0)
    """By place of a peer that runs: when it joined, or when what disturbs it is over."""
    clock_right_at_s = 0.0
    at_s = SETTLE_S
    while (at_s := at_s + rng.uniform(*GAP_S)) < seconds:
        calm = {place for place, since_s in calm_at_s.items() if since_s <= at_s}
        settled = {place for place in calm if calm_at_s[place] <= at_s - SETTLE_S}
        may_disturb_settled = len(settled) > MIN_RUNNING
        ended = (calm if may_disturb_settled else calm - settled) - VETERANS
        kinds = ["join", *(("kill", "leave") if ended else ()), *(("stop", "slow") if may_disturb_settled else ())]
        if may_disturb_settled and at_s > clock_right_at_s:  # with two wrong ones, a newcomer could not tell the time
            kinds.append("clock")
        kind = rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        if kind == "join":
            if len(calm_at_s) == MAX_PEERS:
                continue
            place = rng.choice(sorted(set(range(MAX_PEERS)) - calm_at_s.keys()))
            calm_at_s[place] = at_s
            yield Event(at_s, kind, place)
            continue
        place = rng.choice(sorted(ended if kind in ("kill", "leave") else settled))
        if kind in ("kill", "leave"):
            del calm_at_s[place]
            yield Event(at_s, kind, place)
            continue
        lasts_s = min(rng.uniform(*LAST_S), seconds - at_s)
        calm_at_s[place] = at_s + lasts_s
        if kind == "clock":
            clock_right_at_s = at_s + lasts_s + GAP_S[1]
        amount = rng.choice(BYTES_PER_S) if kind == "slow" else rng.choice(WRONG_S) if kind == "clock" else 0.0
        yield Event(at_s, kind, place, lasts_s, amount)


# one peer, as seen from outside


@dataclass
class SoakedPeer:
    """A process, and what it has said.

    Attributes:
        stops: begin and end of the times for which it was stopped; the last may be open.
        calm_at_s: seconds after the start when what disturbs it is over.
    """

    process: Any
    pipe: Connection
    started_at: float
    facts: Facts | None = None
    history: list[Facts] = field(default_factory=list)
    stops: list[tuple[float, float]] = field(default_factory=list)
    calm_at_s: float = math.inf

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def is_stopped(self) -> bool:
        return bool(self.stops) and self.stops[-1][1] == math.inf

    def awake_s(self, begin: float, end: float) -> float:
        """Seconds between two times, without those for which it was stopped."""
        return end - begin - sum(max(min(end, till) - max(begin, since), 0.0) for since, till in self.stops)

    def listen(self) -> bool:
        """Read what it has said; False once it has ended."""
        try:
            while self.pipe.poll():
                self.facts = self.pipe.recv()
                self.history.append(self.facts)
        except (EOFError, OSError):
            return False
        return True

    def longest_wait_s(self) -> float:
        """Of its calls of ``step()``, the one that still runs included."""
        if self.facts is None:
            return 0.0
        waits = list(self.facts.waits)
        if self.facts.in_step_since is not None:
            waits.append((self.facts.in_step_since, self.facts.at))
        return max((self.awake_s(*each) for each in waits), default=0.0)

    def silence_s(self) -> float:
        """Seconds since it has said anything."""
        return self.awake_s(self.facts.at if self.facts is not None else self.started_at, time.monotonic())

    def growth(self) -> dict[str, float]:
        """What has grown too much in its life."""
        if len(self.history) < MIN_SHOWN:
            return {}
        fifth = len(self.history) // 5
        early, late = self.history[fifth : 2 * fifth], self.history[-fifth:]
        more = {
            name: min(getattr(one, name) for one in late) - min(getattr(one, name) for one in early)
            for name in MAX_GROWTH
        }
        return {name: amount for name, amount in more.items() if amount > MAX_GROWTH[name]}


# all peers


class Soak:
    """The peers, by place, and what has come of those that are gone."""

    def __init__(self) -> None:
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.faults.soak_peer"])
        self._began = time.monotonic()
        self.peers: dict[int, SoakedPeer] = {}
        self.kinds: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.hangs: list[str] = []
        self.leaks: list[str] = []
        self.problems: list[str] = []
        self.longest_wait_s = 0.0
        self.loss_first = math.nan
        self.num_rounds = self.num_aborted = 0
        self.num_judged = 0
        self.longest_life_s = 0.0
        self.samples_used = self.samples_due = 0

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def act(self, event: Event) -> None:
        """Let an event happen."""
        self.kinds[event.kind] += 1
        if event.kind == "join":
            self._start(event.place)
            return
        peer = self.peers[event.place]
        peer.calm_at_s = event.at_s + event.lasts_s
        if event.kind == "kill":
            self._kill(event.place)
        elif event.kind == "leave":
            self._interrupt([event.place])
        elif event.kind == "stop":
            os.kill(peer.pid, signal.SIGSTOP)
            peer.stops.append((time.monotonic(), math.inf))
        elif event.kind == "slow":
            self._tell(peer, Command(bytes_per_s=event.amount))
        else:
            self._tell(peer, Command(wrong_s=event.amount))

    def calm_down(self) -> None:
        """End the stops, slow lines and wrong clocks whose time is over."""
        for peer in self.peers.values():
            if peer.calm_at_s > self.now_s:
                continue
            peer.calm_at_s = math.inf
            if peer.is_stopped:
                os.kill(peer.pid, signal.SIGCONT)
                peer.stops[-1] = (peer.stops[-1][0], time.monotonic())
            else:
                self._tell(peer, Command())

    def watch(self, until_s: float) -> None:
        """Hear what the peers say until a time after the start."""
        while (left_s := until_s - self.now_s) > 0:
            pipes: list[Any] = [peer.pipe for peer in self.peers.values()]
            wait(pipes, timeout=min(left_s, 0.25))
            for place, peer in list(self.peers.items()):
                if not peer.listen():
                    self.problems.append(f"the peer at place {place} ended by itself at {self.now_s:.0f} s")
                    self._bury(place)
                elif peer.facts is not None and math.isnan(self.loss_first) and peer.facts.step > 0:
                    self.loss_first = peer.facts.loss
            self.calm_down()
            self._look_for_hangs()

    def agree(self) -> bool:
        """Wait until all peers hold the same state after the same step; whether they do in time."""
        deadline = self.now_s + AGREE_S
        last_step = max((peer.facts.step for peer in self.peers.values() if peer.facts is not None), default=0)
        while self.now_s < deadline:
            self.watch(self.now_s + 1.0)
            digests = [peer.facts.digests if peer.facts is not None else {} for peer in self.peers.values()]
            common = set.intersection(*(set(each) for each in digests))
            if any(step > last_step and len({each[step] for each in digests}) == 1 for step in common):
                return True
        return False

    def steps(self) -> dict[int, int]:
        """The last step of each peer, by place."""
        return {place: peer.facts.step for place, peer in self.peers.items() if peer.facts is not None}

    def end(self) -> None:
        """Interrupt all peers as Ctrl-C does."""
        self._interrupt(list(self.peers))

    def close(self) -> None:
        """No process outlives this one."""
        for place in list(self.peers):
            self._kill(place)

    def _start(self, place: int) -> None:
        addresses = [address for peer in self.peers.values() if peer.facts for address in peer.facts.addresses]
        while not addresses and self.peers:  # the first one is about to say its own, or hangs
            self.watch(self.now_s + 0.25)
            addresses = [address for peer in self.peers.values() if peer.facts for address in peer.facts.addresses]
        pipe, other_end = self._context.Pipe()
        log = LOGS / f"{self.kinds['join']}-at-place-{place}.log"
        process = self._context.Process(target=run, args=(other_end, addresses, str(log)), daemon=True)
        process.start()
        other_end.close()
        self.peers[place] = SoakedPeer(process, pipe, time.monotonic())

    def _tell(self, peer: SoakedPeer, command: Command) -> None:
        with contextlib.suppress(OSError):  # it has ended by itself, and the next look says so
            peer.pipe.send(command)

    def _kill(self, place: int) -> None:
        os.kill(self.peers[place].pid, signal.SIGKILL)
        self._bury(place)

    def _interrupt(self, places: Sequence[int]) -> None:
        began = time.monotonic()
        for place in places:
            os.kill(self.peers[place].pid, signal.SIGINT)
        for place in places:
            process, facts = self.peers[place].process, self.peers[place].facts
            if facts is not None:
                self.samples_used += facts.counts["samples_used"]
                self.samples_due += facts.counts["samples_computed"] - facts.waiting
            process.join(max(began + LEAVE_S - time.monotonic(), 0.0))
            if process.exitcode is None:
                self.hangs.append(f"the peer at place {place} did not end within {LEAVE_S:.0f} s of Ctrl-C")
                os.kill(process.pid, signal.SIGKILL)
            elif process.exitcode != 0:
                self.problems.append(f"the peer at place {place} left with exit code {process.exitcode}")
            self._bury(place)

    def _bury(self, place: int) -> None:
        """Take a peer's figures when its process is gone."""
        peer = self.peers.pop(place)
        peer.process.join(LEAVE_S)
        peer.listen()
        peer.pipe.close()
        self.longest_wait_s = max(self.longest_wait_s, peer.longest_wait_s())
        self.longest_life_s = max(self.longest_life_s, time.monotonic() - peer.started_at)
        self.num_judged += len(peer.history) >= MIN_SHOWN
        if growth := peer.growth():
            more = ", ".join(f"{name} by {amount:.0f}" for name, amount in growth.items())
            self.leaks.append(f"the peer at place {place}, after {len(peer.history)} s: {more}")
        if peer.facts is not None:
            for reason, num in peer.facts.reasons.items():
                self.reasons[VARYING.sub(lambda match: match.lastgroup or "", reason)] += num
            self.num_rounds += peer.facts.counts["rounds_committed"]
            self.num_aborted += peer.facts.counts["rounds_aborted"]

    def _look_for_hangs(self) -> None:
        for place, peer in list(self.peers.items()):
            if peer.is_stopped:
                continue
            if (longest_s := max(peer.longest_wait_s(), peer.silence_s())) > HANG_S:
                self.hangs.append(f"the peer at place {place} has waited or said nothing for {longest_s:.0f} s")
                self._kill(place)


def soak(seed: int, seconds: float, console: Console) -> dict[str, Any]:
    """Let all events happen; returns the object of the module's docstring."""
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    soaking = Soak()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("soak", total=seconds)
            for event in events(seed, seconds):
                soaking.watch(event.at_s)
                if (event.kind == "join") != (event.place in soaking.peers):  # it may have ended by itself
                    soaking.act(event)
                steps = soaking.steps()
                words = f"step {max(steps.values(), default=0)}, {len(soaking.peers)} peers"
                progress.update(task, completed=soaking.now_s, description=words)
            soaking.watch(seconds + 1.0)
        if not soaking.agree():
            soaking.problems.append(f"no agreement within {AGREE_S:.0f} s; the last steps are {soaking.steps()}")
        survivors = [peer for peer in soaking.peers.values() if peer.facts is not None]
        step = max(soaking.steps().values(), default=0)
        soaking.end()
    finally:
        soaking.close()
    return {**figures_of(soaking, survivors), "global_steps": step, "seed": seed, "minutes": seconds / 60}


def figures_of(soaking: Soak, survivors: Sequence[SoakedPeer]) -> dict[str, Any]:
    """The figures, with a line in ``problems`` for each that is not as promised."""
    last = [peer.facts for peer in survivors if peer.facts is not None]
    used = sum(facts.counts["samples_used"] for facts in last)
    due = sum(facts.counts["samples_computed"] - facts.waiting for facts in last)
    share = used / due if due else math.nan
    share_of_all = soaking.samples_used / soaking.samples_due if soaking.samples_due else math.nan
    loss_last = statistics.mean(facts.loss for facts in last) if last else math.nan
    if not loss_last < soaking.loss_first:
        soaking.problems.append(f"the loss did not fall: {soaking.loss_first:.3g}, {loss_last:.3g} in the end")
    if soaking.num_judged < len(VETERANS) and soaking.now_s > 3 * MIN_SHOWN:
        soaking.problems.append(f"only {soaking.num_judged} peers have lived long enough to be judged for growth")
    if soaking.reasons[""]:
        soaking.problems.append(f"{soaking.reasons['']} rounds were aborted without a reason")
    if not share >= LEAST_USED:
        soaking.problems.append(f"of the samples of the peers of the end {share:.4f} count in a step")
    return {
        "events": dict(soaking.kinds),
        "rounds": soaking.num_rounds,
        "aborted": soaking.num_aborted,
        "reasons": dict(soaking.reasons.most_common()),
        "hangs": soaking.hangs,
        "leaks": soaking.leaks,
        "problems": soaking.problems,
        "judged_for_growth": soaking.num_judged,
        "longest_life_s": round(soaking.longest_life_s),
        "longest_wait_s": round(soaking.longest_wait_s, 1),
        "loss_first": soaking.loss_first,
        "loss_last": loss_last,
        "samples_used_share": round(share, 4),
        "samples_used_share_of_all": round(share_of_all, 4),
    }


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; for example 30")
    return minutes


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if all is as promised."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=_minutes, default=30.0, help="how long events happen (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the events (default: 1)")
    options = parser.parse_args(arguments)
    try:
        figures = soak(options.seed, options.minutes * 60, Console(stderr=True))
    except KeyboardInterrupt:
        return 130
    print(json.dumps(figures, indent=2))
    return int(bool(figures["hangs"] or figures["leaks"] or figures["problems"]))


if __name__ == "__main__":
    sys.exit(main())
