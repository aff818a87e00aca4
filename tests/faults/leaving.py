"""Five peers on loopback, of which one leaves in the middle of a round, many times: what that costs the others.

    python -m tests.faults.leaving --way peer --trials 100

``--way`` is what is closed: ``peer``, ``optimizer`` or ``averager``. ``--who leader`` closes the leader of the group,
``any`` one of the five. The same in virtual time: ``tests/simulation/test_round_faults.py``.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

import manyhands
from manyhands.averaging import AveragingConfig
from manyhands.averaging.messages import Verdict
from manyhands.averaging.round.driver import RoundDriver
from tests.phases import Phase, around_rounds, on_phase
from tests.trainers import BATCH_SIZE, Trainer, in_threads, peers

NUM_PEERS = 5
WIDTH = 20_000
"""Values enough for a round to take a moment."""
TARGET = 4 * NUM_PEERS * BATCH_SIZE
STEPS_BEFORE, STEPS_AFTER = 2, 5
LIMIT_S = 150.0
LONG_S = 10.0
"""A step that takes longer has waited for somebody in vain."""


@dataclass(eq=False)
class Member:
    """One of the five.

    Attributes:
        step: takes part in a round, or comes nearer to one; returns the members of the round that it was in, if any.
        rounds: when each ended, and with whom.
    """

    peer: manyhands.Peer
    step: Callable[[], Iterable[str]]
    close: Callable[[], None]
    num_dropped: Callable[[], int]
    rounds: list[tuple[float, frozenset[str]]] = field(default_factory=list)

    def live(self, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_over() and time.monotonic() < deadline:
            if members := frozenset(self.step()):
                self.rounds.append((time.monotonic(), members))
            time.sleep(0.005)

    def num_full_rounds(self) -> int:
        return sum(len(members) == NUM_PEERS for _, members in self.rounds)


@dataclass
class Costs:
    """What a departure has cost the others.

    Attributes:
        blamed: times that one of those who stay was told that another of them was to blame.
        left_out: rounds of others in which one of those who stay is not a member.
        dropped: samples.
        longest_s: between two steps of one peer.
    """

    blamed: int = 0
    left_out: int = 0
    dropped: int = 0
    longest_s: float = 0.0

    @property
    def is_delay(self) -> bool:
        return self.left_out > 0 or self.longest_s > LONG_S


def trial(way: str, who: str, rng: random.Random) -> Costs:
    """Have one of five peers leave in mid-round."""
    join = _averages if way == "averager" else _trains
    with peers(NUM_PEERS) as swarm:
        members = [join(peer) for peer in swarm]
        leaver = min(members, key=lambda one: one.peer.peer_id) if who == "leader" else rng.choice(members)
        staying = [member for member in members if member is not leaver]
        costs, ids = Costs(), frozenset(member.peer.peer_id for member in staying)
        leave = partial(_leave_in_mid_round, leaver, leaver.peer.close if way == "peer" else leaver.close, rng)
        gone = threading.Event()
        num_looked_at: dict[Member, int] = {}  # rounds; in later ones some may have stopped

        def note_blame(blamed: Sequence[str]) -> None:
            costs.blamed += not ids.isdisjoint(blamed)

        def stay(member: Member) -> None:
            member.live(gone.is_set)
            num_looked_at[member] = len(member.rounds) + STEPS_AFTER
            member.live(lambda: len(num_looked_at) == len(staying) and all(map(has_seen_enough, staying)))

        def has_seen_enough(member: Member) -> bool:
            return len(member.rounds) >= num_looked_at[member]

        def go() -> None:
            try:
                leaver.live(gone.is_set)
            except manyhands.ManyhandsError:  # it was closed in the call
                assert gone.is_set()

        for member in staying:
            _on_blame(member, note_blame)
        in_threads([partial(leave, gone), go, *(partial(stay, member) for member in staying)], 3 * LIMIT_S)
        for member in staying:
            looked_at = member.rounds[: num_looked_at[member]]
            rounds = list(itertools.dropwhile(lambda one: len(one[1]) < NUM_PEERS, looked_at))
            costs.left_out += sum(not ids <= others for _, others in rounds)
            waits_s = (late - early for (early, _), (late, _) in itertools.pairwise(rounds))
            costs.longest_s = max(costs.longest_s, *waits_s)
            costs.dropped += member.num_dropped()
            member.close()
    return costs


def _leave_in_mid_round(leaver: Member, close: Callable[[], None], rng: random.Random, gone: threading.Event) -> None:
    """Close it at any moment of a round, which is about as long as the last one."""
    formed, began_at, lasted_s = threading.Event(), 0.0, 0.0

    def notify(phase: Phase) -> None:
        nonlocal began_at, lasted_s
        if phase is Phase.FORMED:
            began_at = time.monotonic()
            if leaver.num_full_rounds() >= STEPS_BEFORE:
                formed.set()
        elif phase is Phase.CONCLUDED:
            lasted_s = time.monotonic() - began_at

    on_phase(leaver.peer.peer_id, notify)
    assert formed.wait(LIMIT_S), "no round of all five has formed"
    time.sleep(rng.uniform(0.0, lasted_s))
    gone.set()
    close()


def _on_blame(member: Member, notify: Callable[[Sequence[str]], None]) -> None:
    async def around(driver: RoundDriver, run: Callable[[], Awaitable[Verdict]]) -> Verdict:
        verdict = await run()
        notify(verdict.blamed)
        return verdict

    around_rounds(member.peer.peer_id, around)


def _trains(peer: manyhands.Peer) -> Member:
    trainer = Trainer(peer, "leaving", TARGET, width=WIDTH, averaging=AveragingConfig())
    optimizer = trainer.optimizer

    def step() -> Iterable[str]:
        before = optimizer.global_step
        trainer.train_batch()
        if optimizer.global_step == before:
            return []
        return optimizer.last_round.members if optimizer.last_round is not None else [peer.peer_id]

    return Member(peer, step, optimizer.close, lambda: optimizer.statistics.samples_dropped)


def _averages(peer: manyhands.Peer) -> Member:
    averager = manyhands.Averager([torch.ones(8 * WIDTH)], peer=peer, run_id="leaving")
    return Member(peer, lambda: averager.step(1.0, 30.0).group, averager.close, lambda: 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if no departure has cost the others anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.leaving", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--way", choices=["peer", "optimizer", "averager"], default="peer")
    parser.add_argument("--who", choices=["leader", "any"], default="leader")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--log", action="store_true", help="show what the peers log")
    options = parser.parse_args(arguments)
    if options.log:
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(message)s")
    else:
        logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    found: list[Costs] = []
    for seed in range(options.first, options.first + options.trials):
        try:
            costs = trial(options.way, options.who, random.Random(seed))
        except manyhands.Unavailable as error:  # the machine is so busy that the five do not find each other
            print(f"seed {seed} could not begin: {error}", flush=True)
            continue
        found.append(costs)
        if costs.blamed or costs.dropped or costs.is_delay:
            print(f"seed {seed}: {costs}", flush=True)
    print(
        f"{options.way}.close() of {options.who}, {len(found)} times: innocent peers blamed in "
        f"{sum(costs.blamed > 0 for costs in found)}, left out or delayed in {sum(costs.is_delay for costs in found)} "
        f"({sum(costs.left_out for costs in found)} rounds), samples dropped in "
        f"{sum(costs.dropped > 0 for costs in found)} ({sum(costs.dropped for costs in found)} samples); longest step: "
        f"{max(costs.longest_s for costs in found):.1f} s"
    )
    return int(any(costs.blamed or costs.dropped or costs.is_delay for costs in found))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
