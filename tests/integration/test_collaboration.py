"""Optimizers whose peers come, die, lag and lie: the others go on, lose no sample, and end with the same state."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import pytest
import torch

import manyhands
from manyhands.averaging import AveragingConfig
from manyhands.averaging.allreduce.streams import RoundStream
from manyhands.averaging.messages import CALL, CallRequest, Group, Position, Verdict, Vote
from manyhands.averaging.peer_records import GOODBYE, PROGRESS_KIND, PeerRecord, peer_key
from manyhands.averaging.round.driver import RoundDriver
from manyhands.averaging.round.exchange import Contribution
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.errors import ConfigError, ManifestMismatch, ManyhandsError, Timeout, Unavailable
from manyhands.optim import ProgressConfig, blocking_client
from manyhands.optim.manifest import read_manifest
from manyhands.optim.run.progress import ProgressReader
from tests.machine import Machine
from tests.phases import Connect, around_connects, around_rounds, before_voting, change_first_vote
from tests.sweeps import few_of
from tests.trainers import AVERAGING, FAST, LISTEN, Trainer, in_threads, kill, mortal, peers, step_until


@pytest.mark.parametrize("is_leader", few_of([False, True], 1, pytest.mark.long))
def test_a_trainer_killed_in_mid_round_costs_the_others_no_sample(is_leader: bool) -> None:
    """Nor a round, unless it leads: then that is aborted, and its members form a group again."""
    with peers(3) as swarm:
        trainers = [Trainer(peer, "killed", 24) for peer in swarm]
        others = sorted(trainers, key=lambda trainer: trainer.peer.peer_id)  # the first one leads
        victim = others.pop(0 if is_leader else 1)
        in_mid_round = threading.Event()

        async def stop_at_the_second_stream(
            connect: Connect, group: Group, rank: int, other: int, *more: Any
        ) -> RoundStream:
            if other == 2:
                in_mid_round.set()
                await asyncio.Event().wait()
            return await connect(group, rank, other, *more)

        around_connects(victim.peer.peer_id, stop_at_the_second_stream)

        def train_and_die() -> None:
            with pytest.raises((ManyhandsError, concurrent.futures.CancelledError)):
                victim.train_until(1)

        def watch() -> None:
            assert in_mid_round.wait(120)
            kill(victim.peer)

        in_threads([train_and_die, watch, *(lambda t=trainer: t.train_until(3) for trainer in others)])
        for trainer in others:
            counts = trainer.optimizer.statistics
            assert counts.rounds_aborted == is_leader
            assert counts.rounds_committed == 3
            assert counts.samples_dropped == counts.states_loaded == counts.steps_alone == 0
            assert counts.samples_used + trainer.optimizer.samples_accumulated == counts.samples_computed
        assert others[0].optimizer.state_digest() == others[1].optimizer.state_digest()


@pytest.mark.parametrize("is_noticed", few_of([False, True], 1, pytest.mark.long))
def test_a_member_that_lost_the_result_gets_it_and_its_samples_do_not_count_again(is_noticed: bool) -> None:
    """The others keep the means for it; if they do not know that it lost them, it loads the state."""
    with peers(3) as swarm:
        trainers = [Trainer(peer, "unlucky", 12) for peer in swarm]
        leader, other, unlucky = sorted(trainers, key=lambda trainer: trainer.peer.peer_id)
        is_counted, is_decided = threading.Event(), threading.Event()

        async def wait_for_its_vote() -> None:  # on their own networks' threads; else they may commit before it comes
            while is_noticed and not is_counted.is_set():
                await asyncio.sleep(0.01)

        async def wait_for_the_verdict() -> None:
            while not is_noticed and not is_decided.is_set():
                await asyncio.sleep(0.01)

        async def note_votes(driver: RoundDriver, run: Callable[[], Awaitable[Verdict]]) -> Verdict:
            count = driver.vote

            def count_and_note(rank: int, vote: Vote) -> None:
                count(rank, vote)
                is_counted.set()

            driver.vote = count_and_note  # type: ignore[method-assign]
            verdict = await run()
            is_decided.set()
            return verdict

        before_voting(leader.peer.peer_id, wait_for_its_vote)
        before_voting(other.peer.peer_id, wait_for_its_vote)
        before_voting(unlucky.peer.peer_id, wait_for_the_verdict)
        around_rounds(leader.peer.peer_id, note_votes)

        def lose(contribution: Contribution, vote: Vote) -> None:
            contribution.means = None
            vote.digests = [b"a memory chip that forgets"] * len(vote.digests)

        change_first_vote(unlucky.peer.peer_id, lose)

        def train(trainer: Trainer) -> None:
            trainer.train_batch()
            step_until(trainer.optimizer, lambda: trainer.optimizer.global_step == 1)

        in_threads([lambda t=trainer: train(t) for trainer in trainers])
        counts = unlucky.optimizer.statistics
        assert counts.states_loaded == (not is_noticed)
        assert counts.samples_computed == 4
        assert (counts.samples_used, counts.samples_dropped) == (4, 0)
        assert len({trainer.optimizer.state_digest() for trainer in trainers}) == 1


@pytest.mark.long
def test_peers_that_come_and_die_at_any_moment_end_with_one_state() -> None:
    config = AveragingConfig(matchmaking_time_s=1.0, averaging_timeout_s=6.0)
    progress = ProgressConfig(min_refresh_s=0.05, max_refresh_s=0.3, ttl_s=10.0)
    num_slots, steps_of_churn = 3, 20
    survivors: list[Trainer] = []
    is_over = threading.Event()
    at_end = threading.Barrier(num_slots)
    with mortal(), manyhands.Peer(listen=LISTEN) as first:

        def slot(number: int) -> None:
            """Peers one after the other. Those of slot 0 never die: somebody has to live on with the state."""
            rng = random.Random(number)
            while True:
                peer = manyhands.Peer(initial_peers=first.addresses, listen=LISTEN)
                try:
                    trainer = Trainer(peer, "churn", 20, seed=number, averaging=config, progress=progress)
                except Unavailable:  # the only holder of the state died just now
                    peer.close()
                    continue
                life_s = rng.uniform(0.2, 2.5)
                killer = threading.Timer(life_s, kill, [peer])
                is_killed = number > 0 and rng.random() < 0.6 and not is_over.is_set()
                if is_killed:
                    killer.start()
                end = time.monotonic() + life_s
                try:
                    while is_killed or not is_over.is_set():
                        trainer.train_batch()
                        time.sleep(rng.uniform(0.02, 0.06))
                        if number == 0 and trainer.optimizer.global_step >= steps_of_churn:
                            is_over.set()
                        if number > 0 and not is_killed and time.monotonic() > end:
                            break
                    if is_over.is_set():
                        survivors.append(trainer)
                        return
                except (ManyhandsError, concurrent.futures.CancelledError):
                    if not is_killed:
                        raise
                    killer.join()
                else:
                    peer.close()

        try:
            in_threads([lambda n=number: slot(n) for number in range(num_slots)], 40.0)
            assert len(survivors) == num_slots
            goal = max(trainer.optimizer.global_step for trainer in survivors) + 4

            def settle(trainer: Trainer) -> None:
                trainer.train_until(goal, pause_s=0.04)
                at_end.wait(120)

            in_threads([lambda t=trainer: settle(t) for trainer in survivors], 40.0)
            assert goal >= steps_of_churn + 4, "steps were lost with the peers that died"
            assert len({trainer.optimizer.state_digest() for trainer in survivors}) == 1
        finally:
            for trainer in survivors:
                trainer.peer.close()


# who steps alone, and who does not


def test_a_peer_called_by_an_unseen_peer_does_not_step_alone() -> None:
    with peers(2) as (peer, caller):
        trainer = Trainer(peer, "called", 8)

        async def call() -> None:
            reader = ProgressReader(caller.endpoint, caller.dht, "called")
            while (record := reader.records().get(peer.peer_id)) is None:
                await reader.refresh()
            request = CallRequest(trainer.optimizer.manifest.fingerprint(), record.position)
            await RunEndpoint(caller.endpoint, "called").call(peer.peer_id, CALL, request, 5.0)

        caller.run(call(), 20.0, "calling")
        trainer.train_batch()
        counts = trainer.optimizer.statistics
        assert (counts.rounds_aborted, counts.steps_alone) == (1, 0)
        trainer.train_batch()
        assert counts.steps_alone == 1, "nobody has called again, and the target is reached"
        assert counts.samples_used == 8


def publish(peer: manyhands.Peer, run_id: str, position: Position | None) -> None:
    """Publish a progress record of a peer that does nothing else in the run; None says goodbye."""
    value: Any = GOODBYE
    if position is not None:
        record = PeerRecord(position, False, peer.addresses, 30.0, samples_per_second=1.0, lineage_samples=10**6)
        value = msgspec.to_builtins(record, builtin_types=(bytes,))
    peer.run(peer.dht.store(peer_key(run_id, PROGRESS_KIND), value, 30.0, subkey=peer.peer_id), 5.0, "publishing")


def test_a_peer_that_cannot_reach_the_run_does_not_make_a_branch_of_its_own() -> None:
    with peers(2) as (peer, liar):
        trainer = Trainer(peer, "ahead", 8)
        publish(liar, "ahead", Position(9, b"whose state nobody can get"))
        step_until(trainer.optimizer, lambda: trainer.optimizer.health.alone_s is None)  # it sees the liar
        for _ in range(4):
            trainer.train_batch()
        counts = trainer.optimizer.statistics
        assert trainer.optimizer.global_step == 0
        assert counts.samples_dropped == 0
        publish(liar, "ahead", None)
        step_until(trainer.optimizer, lambda: trainer.optimizer.global_step == 1)
        assert counts.samples_used == 16


def test_trainers_go_on_without_a_branch_that_nobody_can_reach() -> None:
    """As when a leader commits and dies before anybody hears of it, except in its last record."""
    with peers(3) as (one, two, dead):
        trainers = [Trainer(peer, "stranded", 16) for peer in (one, two)]
        publish(dead, "stranded", Position(1, b"committed by nobody else"))
        in_threads([lambda t=trainer: t.train_until(2) for trainer in trainers])
        for trainer in trainers:
            counts = trainer.optimizer.statistics
            assert counts.steps_alone == counts.samples_dropped == 0
        assert trainers[0].optimizer.state_digest() == trainers[1].optimizer.state_digest()


def test_a_newcomer_that_gets_no_state_names_the_peers_that_it_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_client, "MOMENT_S", 0.05)
    monkeypatch.setattr(blocking_client, "JOIN_S", 1.0)
    with peers(2) as (liar, peer):
        publish(liar, "no-state", Position(9, b"whose state nobody can get"))
        with pytest.raises(Unavailable, match=f"no peer could hand out the state of the run: {liar.peer_id}"):
            Trainer(peer, "no-state", 8)
        publish(liar, "no-state", None)
        assert Trainer(peer, "no-state", 8).optimizer.global_step == 0, "nothing of the first attempt is in the way"


def test_a_peer_that_leaves_is_not_waited_for() -> None:
    with peers(2) as (staying, leaving):
        one, two = Trainer(staying, "leaving", 16), Trainer(leaving, "leaving", 16)
        in_threads([lambda: one.train_until(1), lambda: two.train_until(1)])
        two.optimizer.close()
        with Machine() as machine:
            started = time.monotonic()
            one.train_until(2)
            took_s = time.monotonic() - started
        assert took_s < machine.allows(FAST.ttl_s / 2)
        assert one.optimizer.statistics.steps_alone == 1


@pytest.mark.parametrize(
    "options",
    few_of([{}, {"delay": "gradients"}, {"local_steps": manyhands.LocalSteps()}]),
    ids=["steps", "delay", "local steps"],
)
def test_a_peer_whose_program_has_lost_its_optimizer_is_not_waited_for(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As when the function that made it has returned, or a notebook has another value under its name."""
    caplog.set_level(logging.INFO, "manyhands.optim")
    with peers(2) as (staying, losing):
        trainers = [Trainer(peer, "lost", 16, progress=ProgressConfig(), **options) for peer in (staying, losing)]
        in_threads([lambda t=trainer: t.train_until(1) for trainer in trainers])
        trainers.pop().optimizer.settle()
        gc.collect()
        (one,) = trainers
        with Machine() as machine:
            started = time.monotonic()
            one.train_until(3)
            took_s = time.monotonic() - started
        assert took_s < machine.allows(ProgressConfig.ttl_s / 2)
        assert caplog.text.count("The Optimizer of run 'lost' is gone without close(): this peer leaves the run") == 1
        for _ in range(2):
            three = Trainer(losing, "lost", 16, **options)
            del three  # nothing of it is in the way of the next one
            gc.collect()
        three = Trainer(losing, "lost", 16, **options)
        three.optimizer.close()
        del three
    assert caplog.text.count("is gone without close()") == 3


@pytest.mark.parametrize("delay", [None, "gradients"])
def test_closing_the_optimizer_in_mid_round_ends_the_round_and_loses_no_sample(delay: str | None) -> None:
    with peers(2) as swarm:
        num_to_close = len(swarm[0].presence.on_close)
        leaving, staying = (Trainer(peer, "closed", 16, delay=delay) for peer in swarm)
        in_mid_round = threading.Event()

        async def never_connect(*_: Any) -> Any:
            in_mid_round.set()
            await asyncio.Event().wait()

        around_connects(leaving.peer.peer_id, never_connect)

        def train_until_closed() -> None:
            with pytest.raises(ManyhandsError, match="this peer left the run"):
                leaving.train_until(1)

        def close() -> None:
            assert in_mid_round.wait(120)
            leaving.optimizer.close()

        in_threads([train_until_closed, close, lambda: staying.train_until(1)])
        counts = leaving.optimizer.statistics
        assert (counts.rounds_aborted, counts.rounds_committed) == (1, 0)
        assert counts.samples_dropped == 0
        assert leaving.optimizer.samples_accumulated == counts.samples_computed > 0
        assert len(leaving.peer.presence.on_close) == num_to_close, "the peer has nothing of it to close"


class InOrder(random.Random):
    """Asks one peer before the others."""

    first = ""

    def shuffle(self, x: Any) -> None:
        x.sort(key=lambda peer_id: peer_id != self.first)


@pytest.mark.parametrize("num_liars", few_of([3, 1], 1, pytest.mark.long))
def test_a_state_that_the_majority_does_not_have_is_not_taken(num_liars: int, caplog: pytest.LogCaptureFixture) -> None:
    """Unless nobody hands out another one: users' own code may change it after its sums were published."""
    with peers(4) as (*swarm, newcomer):
        trainers = [Trainer(peer, "sums", 24) for peer in swarm]
        in_threads([lambda t=trainer: t.train_until(1) for trainer in trainers])  # type: ignore[misc]
        published = [parameter.detach().clone() for parameter in trainers[0].model.parameters()]
        for trainer in trainers[:num_liars]:
            with torch.no_grad():
                next(iter(trainer.model.parameters())).add_(1.0)
        newcomer.presence.rng = InOrder()
        newcomer.presence.rng.first = trainers[0].peer.peer_id
        late = Trainer(newcomer, "sums", 24, seed=5)
        change = 1.0 if num_liars == 3 else 0.0
        for parameter, before in zip(late.model.parameters(), published, strict=True):
            assert torch.equal(parameter, before + change)
            change = 0.0
        if num_liars == 1:
            assert f"Peer {trainers[0].peer.peer_id} sent a state of step 1 that is not the majority's" in caplog.text
        else:
            assert "is not what the majority published. It is used" in caplog.text


# what peers must agree on, and what not


def test_peers_behind_are_waited_for_as_long_as_they_live() -> None:
    with peers(3) as swarm:
        *ahead, behind = (Trainer(peer, "behind", 12) for peer in swarm)
        in_threads([lambda t=trainer: t.train_until(1) for trainer in (*ahead, behind)])  # type: ignore[misc]
        in_threads([lambda t=trainer: t.train_until(2) for trainer in ahead])  # type: ignore[misc]
        one = ahead[0].optimizer
        step_until(one, lambda: not one.wait_for_others(0.5))
        kill(behind.peer)
        with Machine() as machine:
            started = time.monotonic()
            assert one.wait_for_others(20.0)
            took_s = time.monotonic() - started
        assert took_s < machine.allows(FAST.ttl_s)


def test_two_optimizers_on_one_peer_are_refused_and_the_first_goes_on() -> None:
    with peers(1) as (peer,):
        trainer = Trainer(peer, "first", 8)
        with pytest.raises(ConfigError, match="this peer has an Optimizer already"):
            Trainer(peer, "second", 8)
        assert peer.run(read_manifest(peer.dht, "second"), 5.0, "reading") is None
        trainer.train_until(1)
        trainer.optimizer.close()
        assert peer.run(read_manifest(peer.dht, "first"), 5.0, "reading") is None
        assert Trainer(peer, "second", 8).optimizer.global_step == 0


def freeze_first(model: torch.nn.Module) -> torch.optim.Optimizer:
    next(model.parameters()).requires_grad_(False)
    return torch.optim.AdamW(model.named_parameters(), lr=0.01)


def test_peers_that_train_other_parameters_do_not_fit() -> None:
    """Their vectors would have other lengths, and each round would wait for what never comes."""
    with peers(2) as (one, two):
        first = Trainer(one, "frozen", 8, make=lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.01))
        with pytest.raises(ManifestMismatch, match=r"frozen is \['0.weight'\] here, \[\] in the run"):
            Trainer(two, "frozen", 8, make=freeze_first)
        first.optimizer.close()


def test_peers_may_use_foreach_or_not() -> None:
    with peers(2) as (one, two):
        trainers = [
            Trainer(one, "machines", 8, make=lambda model: torch.optim.AdamW(model.parameters(), foreach=True)),
            Trainer(two, "machines", 8, make=lambda model: torch.optim.AdamW(model.parameters(), foreach=False)),
        ]
        assert len({trainer.optimizer.state_digest() for trainer in trainers}) == 1


def test_a_schedule_that_follows_the_loss_of_one_peer_is_refused() -> None:
    with peers(1) as (peer,), pytest.raises(ConfigError, match="schedule by global step"):
        Trainer(peer, "plateau", 8, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)


# what a newcomer gets


def sequential(inner: torch.optim.Optimizer) -> Any:
    warm_up = torch.optim.lr_scheduler.LinearLR(inner, 0.1, total_iters=2)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 9)
    return torch.optim.lr_scheduler.SequentialLR(inner, [warm_up, decay], [2])


def test_a_newcomer_follows_the_schedule_of_the_others() -> None:
    with peers(2) as (one, two):
        old = Trainer(one, "schedule", 8, scheduler=sequential)
        old.train_until(3)
        new = Trainer(two, "schedule", 8, seed=1, scheduler=sequential)
        assert new.optimizer.global_step == 3
        assert new.optimizer.param_groups is new.optimizer.inner.param_groups, "it shows the rate that is used"
        assert new.optimizer.state is new.optimizer.inner.state
        in_threads([lambda t=trainer: t.train_until(6) for trainer in (old, new)])
        assert new.optimizer.param_groups[0]["lr"] == old.optimizer.param_groups[0]["lr"]
        assert new.optimizer.state_digest() == old.optimizer.state_digest()


def test_newcomers_at_any_moment_of_a_step_take_part() -> None:
    pause_s = 0.04
    have_contributed: set[int] = set()
    with peers(4) as swarm:

        def join(number: int) -> None:
            time.sleep(1.37 * pause_s * number)
            trainer = Trainer(swarm[number], "crowd", 16, seed=number)
            while len(have_contributed) < len(swarm):
                trainer.train_batch()
                time.sleep(pause_s)
                if trainer.optimizer.statistics.rounds_committed > 1:
                    have_contributed.add(number)
            assert trainer.optimizer.statistics.samples_used > 0
            trainer.optimizer.close()

        in_threads([lambda n=number: join(n) for number in range(len(swarm))], 30.0)


# exactly like plain PyTorch


def test_a_gradient_of_zero_is_applied_as_plain_torch_does() -> None:
    """The first factor of a LoRA pair has one while the second is zero; its decay and its counter go on."""

    def new_pair() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        return [torch.randn(2, 5, generator=generator).requires_grad_(), torch.zeros(3, 2, requires_grad=True)]

    def loss_of(pair: list[torch.Tensor], number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        return (torch.randn(4, 5, generator=generator) @ pair[0].T @ pair[1].T - 1).square().mean()

    plain, ours = new_pair(), new_pair()
    optimizer = torch.optim.AdamW(plain, lr=0.1, weight_decay=0.5)
    with peers(1) as (peer,):
        collaborative = manyhands.Optimizer(
            torch.optim.AdamW(ours, lr=0.1, weight_decay=0.5), peer=peer, run_id="lora", target_batch_size=4,
            batch_size_per_step=4, averaging=AVERAGING, progress=FAST,
        )  # fmt: skip
        for number in range(3):
            for pair, one in ((plain, optimizer), (ours, collaborative)):
                loss_of(pair, number).backward()
                one.step()
                one.zero_grad()
        assert collaborative.global_step == 3
    for tensor, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)


def test_a_loaded_optimizer_state_reaches_the_wrapped_optimizer() -> None:
    with peers(1) as (peer,):
        trainer = Trainer(peer, "checkpoint", 8)
        trainer.train_until(1)
        saved = trainer.optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 0.5
        trainer.optimizer.load_state_dict(saved)
        assert trainer.optimizer.inner.param_groups[0]["lr"] == 0.5
        assert trainer.optimizer.param_groups is trainer.optimizer.inner.param_groups
        trainer.train_until(2)


def test_a_network_thread_that_is_held_up_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with peers(1) as (peer,):
        trainer = Trainer(peer, "held-up", 8)
        run = peer.run

        def time_out(coro: Coroutine[Any, Any, Any], timeout_s: float, phase: str) -> Any:
            coro.close()
            raise Timeout(phase, timeout_s)

        monkeypatch.setattr(peer, "run", time_out)
        trainer.train_batch()
        assert trainer.optimizer.samples_accumulated == 4
        monkeypatch.setattr(peer, "run", run)
        trainer.train_batch()
        assert trainer.optimizer.global_step == 1
