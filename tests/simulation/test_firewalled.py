"""Runs in which all who train are in client mode: nobody can dial them, and they can dial nobody who trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from manyhands.averaging.timing import MINUTE_S
from manyhands.base.errors import Unavailable
from manyhands.optim.run.contacts import Contacts
from tests.simulation.swarm_of_trainers import BATCH_S, Member, Swarm

BATCH = 4
TARGET = 16


def seeded(seed: int) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Linear(5, 3)

    return make


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train_batch(member: Member) -> None:
    loss = member.model(torch.randn(BATCH, 5)).square().mean()
    member.step(loss, BATCH_S, batch_size=BATCH)
    member.check_samples()


def train_until(step: int, digests: dict[str, str], *, within_s: float = 300.0) -> Callable[[Member], None]:
    def train(member: Member) -> None:
        until = member.peer.time() + within_s
        while member.optimizer.global_step < step:
            assert member.peer.time() < until, (member.name, member.optimizer.global_step, member.optimizer.statistics)
            train_batch(member)
        digests[member.name] = member.optimizer.state_digest()
        member.optimizer.wait_for_others()

    return train


def train_for(seconds: float) -> Callable[[Member], None]:
    def train(member: Member) -> None:
        until = member.peer.time() + seconds
        while member.peer.time() < until:
            train_batch(member)

    return train


def start_clients(swarm: Swarm, train: Callable[[Member], None], **options: object) -> None:
    swarm.start_coordinator()
    for number, name in enumerate(("one", "two")):
        swarm.start(
            name, seeded(number), adamw, train, client_mode=True, begins_s=1.0 + number, target_batch_size=TARGET,
            **options,
        )  # fmt: skip


def help_until(swarm: Swarm, names: set[str]) -> Callable[[Member], None]:
    def help_out(member: Member) -> None:
        while names - swarm.done:
            member.optimizer.step()
        assert member.optimizer.statistics.samples_computed == 0

    return help_out


@pytest.mark.long
def test_firewalled_peers_make_no_step_alone_keep_their_samples_and_say_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    swarm = Swarm()
    start_clients(swarm, train_for(3 * MINUTE_S))
    swarm.run()
    for member in swarm.members.values():
        if member.name == "two":  # the first one may have begun before it saw anybody
            assert member.optimizer.global_step == 0
            assert member.optimizer.samples_accumulated == member.optimizer.statistics.samples_computed
        assert member.optimizer.statistics.rounds_aborted == 0
    lines = [record.message for record in caplog.records if "that train can be dialled" in record.message]
    assert 4 <= len(lines) <= 8, "each of the two says it every minute"
    assert all("None of the 2 peers that train can be dialled" in line for line in lines)
    assert all("manyhands train --auxiliary --run-id swarm --initial-peers /ip4/" in line for line in lines)


def test_firewalled_peers_step_together_with_an_auxiliary_peer(caplog: pytest.LogCaptureFixture) -> None:
    swarm, digests = Swarm(), dict[str, str]()
    start_clients(swarm, train_until(8, digests))
    swarm.start(
        "helper", seeded(7), adamw, help_until(swarm, {"one", "two"}), begins_s=90.0, target_batch_size=TARGET,
        auxiliary=True,
    )  # fmt: skip
    swarm.run()
    assert len(set(digests.values())) == 1
    for name in ("one", "two"):
        optimizer = swarm.members[name].optimizer
        assert optimizer.last_round is not None
        assert len(optimizer.last_round.members) == 3
        assert optimizer.num_peers == 2, "who has no data is no trainer"
    lines = [record.message for record in caplog.records if "that train can be dialled" in record.message]
    assert len(lines) == 4, "nothing more once the helper is there"


@pytest.mark.long
def test_a_firewalled_peer_without_the_state_is_told_that_it_will_drop_its_gradients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first one has made steps before the second one came, and neither can ask the other for its state."""
    swarm = Swarm()
    swarm.start_coordinator()
    for name, begins_s in (("one", 1.0), ("two", 21.0)):
        swarm.start(
            name, seeded(0), adamw, train_for(140.0 - begins_s), client_mode=True, begins_s=begins_s,
            target_batch_size=TARGET,
        )  # fmt: skip
    swarm.start(
        "helper", seeded(0), adamw, help_until(swarm, {"one", "two"}), begins_s=90.0, target_batch_size=TARGET,
        auxiliary=True,
    )  # fmt: skip
    swarm.run()
    dropped = {name: member.optimizer.statistics.samples_dropped for name, member in swarm.members.items()}
    assert dropped["two"] > 0
    assert dropped["one"] == 0
    lines = [record.message for record in caplog.records if "that train can be dialled" in record.message]
    assert lines
    assert all("the others (1 of the 2) drop theirs when they load that state" in line for line in lines)


@pytest.mark.long
def test_a_late_helper_is_given_the_state_by_firewalled_peers() -> None:
    """The first helper leaves at step 4; the second one and a trainer come with other parameters, at step 4 or so."""
    swarm, digests = Swarm(), dict[str, str]()
    start_clients(swarm, train_until(10, digests))

    def help_for_a_while(member: Member) -> None:
        while member.optimizer.global_step < 4:
            member.optimizer.step()
        member.optimizer.close()

    def help_later(member: Member) -> None:
        assert member.optimizer.global_step >= 4, "it begins with their state"
        assert member.optimizer.statistics.states_loaded == 1
        help_until(swarm, {"one", "two"})(member)

    swarm.start("first helper", seeded(7), adamw, help_for_a_while, target_batch_size=TARGET, auxiliary=True)
    swarm.start("second helper", seeded(8), adamw, help_later, begins_s=120.0, target_batch_size=TARGET, auxiliary=True)
    swarm.run()
    assert len(set(digests.values())) == 1
    for name in ("one", "two"):
        assert swarm.members[name].optimizer.statistics.samples_dropped <= 2 * TARGET


@pytest.mark.long
def test_a_trainer_that_can_be_dialled_gets_the_state_of_firewalled_peers_and_steps_with_them() -> None:
    swarm, digests = Swarm(), dict[str, str]()
    start_clients(swarm, train_until(9, digests))

    def help_for_a_while(member: Member) -> None:
        while member.optimizer.global_step < 4:
            member.optimizer.step()
        member.optimizer.close()

    def train(member: Member) -> None:
        assert member.optimizer.global_step >= 4
        train_until(9, digests)(member)

    swarm.start("helper", seeded(7), adamw, help_for_a_while, target_batch_size=TARGET, auxiliary=True)
    swarm.start("trainer", seeded(8), adamw, train, begins_s=120.0, target_batch_size=TARGET)
    swarm.run()
    assert len(digests) == 3
    assert len(set(digests.values())) == 1


def test_firewalled_peers_go_on_alone_with_allow_solo() -> None:
    swarm = Swarm()
    start_clients(swarm, train_for(60.0), allow_solo=True)
    swarm.run()
    assert all(member.optimizer.global_step > 3 for member in swarm.members.values())


@pytest.mark.long
def test_a_trainer_that_firewalled_peers_cannot_reach_either_is_told_so_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Contacts, "connect_to_those_in_need", lambda self: None)
    swarm, digests = Swarm(), dict[str, str]()
    start_clients(swarm, train_until(1000, digests))

    def help_for_a_while(member: Member) -> None:
        while member.optimizer.global_step < 4:
            member.optimizer.step()
        member.optimizer.close()

    swarm.start("helper", seeded(7), adamw, help_for_a_while, target_batch_size=TARGET, auxiliary=True)
    swarm.start("trainer", seeded(8), adamw, train_for(1.0), begins_s=120.0, target_batch_size=TARGET)
    with pytest.raises(Unavailable, match="only peers in client mode have the state of the run, and none of them has"):
        swarm.run(200.0)


@pytest.mark.long
def test_a_client_that_is_ahead_and_cannot_come_does_not_stop_the_run() -> None:
    """The host cannot ask it for its state, and goes on without it."""
    swarm = Swarm()
    swarm.start_coordinator()

    def leave(member: Member) -> None:
        while member.optimizer.global_step < 8:
            train_batch(member)
        member.optimizer.close()
        swarm.world.block([("client", "host"), ("host", "client")])
        swarm.world.network.reset("client", "host")

    def fall_behind(member: Member) -> None:
        while member.optimizer.global_step < 4:
            train_batch(member)
        member.peer.sleep(25.0)
        train_for(90.0)(member)
        assert member.optimizer.global_step > 8

    swarm.start("another", seeded(0), adamw, leave, target_batch_size=TARGET)
    swarm.start("host", seeded(0), adamw, fall_behind, begins_s=1.1, target_batch_size=TARGET)
    swarm.start("client", seeded(0), adamw, train_for(100.0), begins_s=1.2, target_batch_size=TARGET, client_mode=True)
    swarm.run(300.0)
