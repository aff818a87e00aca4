"""Monitors of a simulated run: the picture, and credit that equals the trainers' own counts."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.averaging import AveragingConfig
from manyhands.base.address import Address
from manyhands.base.identity import PeerId
from manyhands.monitor import RunMonitor
from manyhands.monitor import coordinator_exchange as exchange_module
from manyhands.monitor.coordinator_exchange import HistoryRequest, HistoryResponse, ToldPoint
from manyhands.monitor.history import History
from manyhands.monitor.monitor_events import Happened, MonitorEvent
from manyhands.monitor.picture import RunPicture
from manyhands.optim.local_steps import LocalSteps
from manyhands.optim.metrics import AccountRecord, Failure, read_metrics
from manyhands.peer import Presence
from manyhands.rpc import Endpoint, Method
from manyhands.testing import Host, at
from manyhands.training.report import AccountPublisher, report_step
from tests.simulation.swarm_of_trainers import Member, Swarm
from tests.simulation.worlds import join

TARGET = 48
BATCH = 4
WALL_START_S = 1.8e9
"""The wall clock of simulated hosts at the start."""


@dataclass
class WatchingPeer:
    """The presence of a simulated monitor."""

    presence: Presence

    def __post_init__(self) -> None:
        self.endpoint, self.dht = self.presence.endpoint, self.presence.dht

    @property
    def addresses(self) -> list[str]:
        return [str(address) for address in self.endpoint.addresses]


@dataclass
class Watched:
    """What a monitor has shown."""

    monitor: RunMonitor | None = None
    events: list[MonitorEvent] = field(default_factory=list)

    @property
    def last(self) -> RunPicture:
        assert self.monitor is not None
        assert self.monitor.picture is not None
        return self.monitor.picture


def start_monitor(
    swarm: Swarm, name: str, begins_s: float = 0.0, history: History | None = None, *, is_named: bool = True
) -> Watched:
    """Start a monitor; the first one is the peer that all others join.

    Args:
        is_named: it is an initial peer of all that start later.
    """
    watched = Watched()

    async def program(host: Host) -> None:
        await asyncio.sleep(begins_s)
        presence = Presence(swarm.world.transport(host), rng=swarm.world.rng(name), wall_clock=host.wall_clock)
        try:
            await presence.endpoint.listen([Address.of(host.ip, 0)])
            await join(presence.dht, swarm.initial_peers)
            if is_named:
                swarm.initial_peers.extend(presence.endpoint.addresses)
            monitor = RunMonitor(WatchingPeer(presence), "swarm", watched.events.append, history=history)
            watched.monitor = monitor
            await monitor.start()
            await asyncio.Event().wait()
        finally:
            await presence.stop()

    swarm.world.start(name, program)
    return watched


def start_trainer(
    swarm: Swarm, name: str, until_step: int, batch_s: float, begins_s: float = 1.0, lr: float = 0.125, **options: Any
) -> None:
    def train(member: Member) -> None:
        account = AccountPublisher(member.optimizer, name, "simulated\n")
        optimizer, step = member.optimizer, member.optimizer.global_step
        while optimizer.global_step < until_step:
            inputs = torch.randn(options.get("batch_size_per_step", BATCH), 4)
            member.step(torch.nn.functional.mse_loss(member.model(inputs), inputs[:, :1]), batch_s)
            account.look()
            if optimizer.global_step != step:
                step = optimizer.global_step
                report_step(optimizer, [1.0, math.nan], 1.0, account=account)
        member.wait_for(until_step)

    swarm.start(
        name, lambda: torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)),
        lambda model: torch.optim.SGD(model.parameters(), lr=lr), train, begins_s=begins_s,
        **{"target_batch_size": TARGET, "batch_size_per_step": BATCH} | options,
    )  # fmt: skip


def test_a_monitor_without_trainers_says_each_minute_that_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    swarm = Swarm(seed=2)
    start_monitor(swarm, "monitor")
    swarm.run(until_s=150.0)
    assert [record.message for record in caplog.records].count("Found no active peers") == 3


@pytest.mark.usefixtures("one_thread")
def test_credit_equals_the_counts_of_the_trainers_with_one_killed_and_a_late_monitor(tmp_path: Path) -> None:
    swarm, num_steps = Swarm(seed=1), 10
    killed_at = 14.0  # between two steps: a peer that dies in one may not have counted what the others commit
    early = start_monitor(swarm, "monitor")
    for number, batch_s in enumerate((0.7, 0.9, 1.1)):
        start_trainer(swarm, f"p{number}", num_steps, batch_s, begins_s=1.0 + number / 4)
    late = start_monitor(swarm, "late", begins_s=36.0, history=History("swarm", tmp_path / "late.db"))
    swarm.world.schedule(at(killed_at).kill("p2"))
    swarm.started.discard("p2")
    swarm.run(until_s=75.0)

    used = {name: member.optimizer.statistics.samples_used for name, member in swarm.members.items()}
    assert used["p2"] > 0
    for watched in (early, late):
        assert {row.name: row.samples for row in watched.last.leaders} == used
        assert watched.last.committed_samples == sum(used.values())
        assert watched.last.step == num_steps
        assert watched.monitor is not None
        points = watched.monitor.history.points()
        assert [point.step for point in points] == list(range(1, num_steps + 1))
        assert sum(point.samples for point in points) == sum(used.values())
        assert {row.name: row.state for row in watched.last.peers if row.name != "p2"} == {"p0": "left", "p1": "left"}
    assert early.last.last is not None
    assert (early.last.last.loss, early.last.last.learning_rate) == (1.0, 0.125)
    assert early.last.last.bytes_sent
    dead = swarm.members["p2"].peer.peer_id
    gone = next(event.time for event in early.last.events if (event.kind, event.peer_id) == ("died", dead))
    assert killed_at < gone - WALL_START_S <= killed_at + 15
    kinds = [(event.kind, event.name) for event in early.events if isinstance(event, Happened)]
    assert [kind for kind, _ in kinds[:3]] == ["joined"] * 3
    assert sorted(kinds[3:]) == [("died", "p2"), ("left", "p0"), ("left", "p1")]
    assert [event for event in late.events if isinstance(event, Happened) and event.kind == "restarted"] == []


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_a_late_monitor_asks_its_initial_peers_one_of_which_never_ends_and_no_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swarm, num_steps, asked, handle = Swarm(seed=5), 20, set[str](), Endpoint.handle
    monkeypatch.setattr(exchange_module, "ASK_TIMEOUT_S", 20.0)
    monitors = {"monitor": start_monitor(swarm, "monitor")}
    monitors["slow"] = start_monitor(swarm, "slow", begins_s=0.5)
    monitors["stranger"] = start_monitor(swarm, "stranger", begins_s=0.5, is_named=False)

    names = {swarm.world.identity(name).peer_id: name for name in (*monitors, "late")}

    def noted(name: str, honest: Callable[..., Awaitable[HistoryResponse]]) -> Callable[..., Any]:
        async def on_history(remote: PeerId, request: HistoryRequest) -> HistoryResponse:
            asked.add(name)
            if name == "slow" and request.kind == "points" and request.before_step > 1:
                await asyncio.sleep(9.0)
                step = request.before_step - 1
                return HistoryResponse(points=[ToldPoint(1.0, step, 1.0, None, 1, 1.0, 1, None, None)])
            return await honest(remote, request)

        return on_history

    def handle_noted(self: Endpoint, method: Method[Any, Any], handler: Any, guard: Any = None) -> None:
        if method.request is HistoryRequest:
            handler = noted(names[self.peer_id], handler)
        handle(self, method, handler, guard)

    monkeypatch.setattr(Endpoint, "handle", handle_noted)
    for number in range(2):
        start_trainer(swarm, f"p{number}", num_steps, 0.7)
    late = start_monitor(swarm, "late", begins_s=80.0)
    swarm.run(until_s=125.0)
    assert late.monitor is not None
    points = {point.step: point for point in late.monitor.history.points()}
    assert points.keys() == set(range(1, num_steps + 1))
    assert points[1].samples > 1, "an answer that is not complete does not count"
    assert asked == {"monitor", "slow"}


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_in_a_grid_the_groups_of_the_first_round_are_credited() -> None:
    swarm, num_steps = Swarm(seed=2), 4
    watched = start_monitor(swarm, "monitor")
    averaging = AveragingConfig(codec="none", max_group_size=3, matchmaking_time_s=10.0, averaging_timeout_s=40.0)
    for number in range(9):
        start_trainer(
            swarm, f"p{number}", num_steps, 0.8 + number / 20, averaging=averaging, target_batch_size=9 * 8 * BATCH
        )
    swarm.run(until_s=120.0)
    assert all(member.optimizer.recent_steps.listed()[-1].is_grid for member in swarm.members.values())
    counts = {name: member.optimizer.statistics for name, member in swarm.members.items()}
    credited = {row.name: row.samples for row in watched.last.leaders}
    assert credited == {name: count.samples_used for name, count in counts.items()}
    assert watched.last.step == num_steps


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_with_fragments_credit_follows_the_counts_of_the_trainers() -> None:
    swarm, num_steps, num_fragments = Swarm(seed=4), 32, 4
    watched = start_monitor(swarm, "monitor")
    for name, batch_s, batch_size in (("fast", 0.5, BATCH), ("slow", 2.7, 1)):
        start_trainer(
            swarm, name, num_steps, batch_s, target_batch_size=TARGET, batch_size_per_step=batch_size,
            local_steps=LocalSteps(fragments=num_fragments), lr=0.01,
        )  # fmt: skip
    swarm.run(until_s=120.0)
    used = {name: member.optimizer.statistics.samples_used for name, member in swarm.members.items()}
    credited = {row.name: row.samples for row in watched.last.leaders}
    of_step = {name: number / num_steps for name, number in used.items()}
    for name in used:  # the samples of the last steps are not in all fragments yet
        assert abs(credited[name] - used[name]) <= (num_fragments - 1) / 2 * of_step[name] + 2, (credited, used)


@pytest.mark.usefixtures("one_thread")
def test_a_run_whose_weights_are_tokens_is_credited_in_tokens(tmp_path: Path) -> None:
    swarm, num_tokens = Swarm(seed=6), 7
    history = History("swarm", tmp_path / "history.db")
    watched = start_monitor(swarm, "monitor", history=history)

    def train(member: Member) -> None:
        account, optimizer = AccountPublisher(member.optimizer, member.name, weight_unit="tokens"), member.optimizer
        member.peer.sleep(1.0)
        reading = read_metrics(member.peer.dht, "swarm", AccountRecord)
        published = member.peer.run(reading, 5.0, "reading the accounts")
        assert published[member.peer.peer_id].unit is None, "until there is a batch"
        while (step := optimizer.global_step) < 4:
            inputs = torch.randn(BATCH, 4)
            loss = torch.nn.functional.mse_loss(member.model(inputs), inputs[:, :1])
            member.step(loss, 0.8, weight=BATCH * num_tokens)
            if optimizer.global_step != step:
                report_step(optimizer, [1.0], 1.0, account=account)

    for number in range(2):
        swarm.start(
            f"p{number}", lambda: torch.nn.Linear(4, 1), lambda model: torch.optim.SGD(model.parameters(), lr=0.125),
            train, begins_s=1.0, target_batch_size=TARGET, batch_size_per_step=BATCH,
        )  # fmt: skip
    swarm.run(until_s=60.0)
    used = {name: member.optimizer.statistics.samples_used for name, member in swarm.members.items()}
    assert {row.name: row.samples for row in watched.last.leaders} == {name: 7 * used[name] for name in used}
    assert watched.last.unit == "tokens"
    assert watched.last.target_batch_size == TARGET
    history.close()
    again = History("swarm", tmp_path / "history.db")
    assert again.read_unit() == "tokens"
    again.close()


@pytest.mark.usefixtures("one_thread")
def test_publishing_an_account_delays_no_training_also_at_a_learning_rate_of_zero() -> None:
    swarm, waits = Swarm(seed=3), list[float]()
    watched = start_monitor(swarm, "monitor")

    def train(member: Member) -> None:
        account, optimizer = AccountPublisher(member.optimizer, member.name), member.optimizer
        while optimizer.global_step < 4:
            inputs = torch.randn(BATCH, 4)
            member.step(torch.nn.functional.mse_loss(member.model(inputs), inputs[:, :1]), 0.8)
            optimizer.last_failure = Failure(optimizer.global_step, "the others are slow")
            began = member.peer.time()
            account.look()
            account.step_made()
            waits.append(member.peer.time() - began)

    for number in range(2):
        swarm.start(
            f"p{number}", lambda: torch.nn.Linear(4, 1), lambda model: torch.optim.SGD(model.parameters(), lr=0.125),
            train, begins_s=1.0, target_batch_size=TARGET, batch_size_per_step=BATCH,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 2),
        )  # fmt: skip
    swarm.run(until_s=60.0)
    assert {member.optimizer.global_step for member in swarm.members.values()} == {4}
    assert max(waits) == 0.0
    used = {name: member.optimizer.statistics.samples_used for name, member in swarm.members.items()}
    assert {row.name: row.samples for row in watched.last.leaders} == used
