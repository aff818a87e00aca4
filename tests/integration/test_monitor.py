"""What a monitor makes of the records that peers publish."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manyhands import Peer
from manyhands.access import Charter, SignedCharter
from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import GOODBYE, PROGRESS_KIND, PeerRecord, peer_key
from manyhands.base.errors import Refused
from manyhands.base.ticket import Ticket
from manyhands.monitor import RunMonitor
from manyhands.monitor.coordinator_exchange import Exchange, named_peers
from manyhands.monitor.history import History
from manyhands.monitor.monitor_events import Happened, HeldoutSeen, MonitorEvent, ProgressMade, StepMade
from manyhands.monitor.picture import Point
from manyhands.optim.manifest import RunManifest, manifest_key
from manyhands.optim.metrics import (
    AccountRecord,
    HeldoutRecord,
    MetricsRecord,
    RecentSteps,
    alone_lineage,
    metrics_key,
    publish_metrics,
)
from tests.network import identity_of
from tests.waiting import wait_until

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def told(events: list[MonitorEvent], kind: Any) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_monitor_reports_held_out_losses_once_the_run_is_there_and_after_the_last_trainer_has_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "manyhands.monitor")
    events: list[MonitorEvent] = []

    with (
        Peer(listen=[LOOPBACK]) as here,
        Peer(here.addresses, listen=[LOOPBACK]) as trainer,
        Peer(here.addresses, listen=[LOOPBACK]) as liar,
    ):
        monitor = RunMonitor(here, "run", events.append, refresh_s=0.5)
        here.run(monitor.start(), 5.0, "starting")

        def progress(value: Any) -> None:
            plain = msgspec.to_builtins(value, builtin_types=(bytes,))
            trainer.store(peer_key("run", PROGRESS_KIND), plain, ttl_s=60, subkey=trainer.peer_id)

        def measured(peer: Peer, step: int, loss: float) -> None:
            record = HeldoutRecord(step, loss, 0.25, 0.5, 64)
            peer.run(publish_metrics(peer.dht, peer.peer_id, "run", record), 5.0, "publishing")

        def learnt(peer: Peer, step: int) -> None:
            record = MetricsRecord(step, 1.5, 64, 18.0, 4)
            peer.run(publish_metrics(peer.dht, peer.peer_id, "run", record), 5.0, "publishing")

        progress(
            PeerRecord(
                Position(3, b"x"), False, trainer.addresses, 60.0, samples=8, samples_per_second=2.5, lineage_samples=64
            )
        )
        learnt(liar, 4)  # it was never seen to train
        measured(liar, 10**15, 0.0)
        learnt(trainer, 3)
        wait_until(lambda: told(events, StepMade))
        measured(trainer, 3, 5.5)
        wait_until(lambda: told(events, HeldoutSeen))
        assert told(events, StepMade) == [StepMade(3, 4.5, 1, 64, 1.5)]
        assert told(events, HeldoutSeen) == [HeldoutSeen(3, 5.5, 0.25, 0.5)]

        fourth = alone_lineage(b"x", trainer.peer_id, bytes(32))
        progress(
            PeerRecord(
                Position(4, fourth),
                False,
                trainer.addresses,
                60.0,
                samples=8,
                samples_per_second=2.5,
                lineage_samples=64,
            )
        )
        wait_until(lambda: events[-1].step == 4)  # type: ignore[union-attr]
        progress(GOODBYE)
        bad = {"step": 4, "loss": 1.0, "mlm_accuracy": 7.0, "sop_accuracy": 0.5, "num_samples": 1}
        liar.store(metrics_key("run", HeldoutRecord), bad, ttl_s=60, subkey=liar.peer_id)
        learnt(trainer, 4)
        measured(trainer, 4, 5.25)
        wait_until(lambda: len(told(events, HeldoutSeen)) == 2)
        assert told(events, HeldoutSeen)[1] == HeldoutSeen(4, 5.25, 0.25, 0.5)
        wait_until(lambda: len(told(events, StepMade)) == 2)

        hostile = {"name": "\x1b[2J", "step": 4, "samples_used": 10**6}
        liar.store(metrics_key("run", AccountRecord), hostile, ttl_s=60, subkey=liar.peer_id)
        alone = RecentSteps(trainer.peer_id)
        alone.add(Position(3, b"x"), Position(4, fourth), {trainer.peer_id: 64.0}, roster=bytes(32))
        account = AccountRecord(name="<img onerror>", step=4, steps=alone.listed())
        trainer.run(publish_metrics(trainer.dht, trainer.peer_id, "run", account), 5.0, "publishing")
        wait_until(lambda: monitor.picture is not None and monitor.picture.leaders)
        assert monitor.picture is not None
        (leader,) = monitor.picture.leaders
        assert (leader.name, leader.peer_ids, leader.samples) == ("<img onerror>", [trainer.peer_id], 64)
        kinds = [event.kind for event in told(events, Happened)]
        assert kinds[0] == "joined"
        assert set(kinds[1:]) == {"left", "refused"}

        progress(
            PeerRecord(
                Position(1, b"z"), False, trainer.addresses, 60.0, samples=8, samples_per_second=2.5, lineage_samples=64
            )
        )  # begun anew
        learnt(trainer, 1)
        wait_until(lambda: len(told(events, StepMade)) == 3)
        wait_until(lambda: "restarted" in [event.kind for event in told(events, Happened)])
        assert told(events, StepMade)[2].step == 1
        assert caplog.text.count("The run has gone back to step 1 from step #4:") == 1


def store_progress(peer: Peer, step: int, lineage: bytes = b"x") -> None:
    """Publish that a peer is at a step."""
    record = PeerRecord(
        Position(step, lineage), False, peer.addresses, 60.0, samples=8, samples_per_second=2.5, lineage_samples=64
    )
    plain = msgspec.to_builtins(record, builtin_types=(bytes,))
    peer.store(peer_key("run", PROGRESS_KIND), plain, ttl_s=60, subkey=peer.peer_id)


def test_a_run_without_a_manifest_has_no_target_and_no_countdown() -> None:
    """As after a restart of the monitor beside trainers in client mode, who publish it once a minute."""
    events: list[MonitorEvent] = []
    with Peer(listen=[LOOPBACK]) as here, Peer(here.addresses, listen=[LOOPBACK]) as trainer:
        monitor = RunMonitor(here, "run", events.append, refresh_s=0.5)
        here.run(monitor.start(), 5.0, "starting")
        record = PeerRecord(Position(3, b"x"), True, [], 60.0, samples=8, samples_per_second=2.5, lineage_samples=64)
        plain = msgspec.to_builtins(record, builtin_types=(bytes,))
        trainer.store(peer_key("run", PROGRESS_KIND), plain, ttl_s=60, subkey=trainer.peer_id)
        wait_until(lambda: monitor.picture is not None and monitor.picture.num_peers == 1)
        picture = monitor.picture
        assert picture is not None
        assert (picture.samples, picture.target_batch_size, picture.eta_s) == (8, 0, None)
        assert {(event.target_batch_size, event.eta_s) for event in told(events, ProgressMade)} == {(0, None)}


def test_a_liar_neither_moves_the_step_that_is_shown_nor_has_the_run_restart_when_it_goes() -> None:
    events: list[MonitorEvent] = []
    with (
        Peer(listen=[LOOPBACK]) as here,
        Peer(here.addresses, listen=[LOOPBACK]) as trainer,
        Peer(here.addresses, listen=[LOOPBACK]) as liar,
    ):
        monitor = RunMonitor(here, "run", events.append, refresh_s=0.5)
        here.run(monitor.start(), 5.0, "starting")

        def says(peer: Peer, step: int) -> None:
            store_progress(peer, step, b"x%d" % step)
            metrics = MetricsRecord(step, 1.5, 64, 18.0, 4)
            peer.run(publish_metrics(peer.dht, peer.peer_id, "run", metrics), 5.0, "publishing")

        def shown() -> int:
            return monitor.picture.step if monitor.picture is not None else 0

        def states() -> set[str]:
            return {row.state for row in monitor.picture.peers} if monitor.picture is not None else set()

        says(trainer, 3)
        wait_until(lambda: shown() == 3)
        says(liar, 1000)
        wait_until(lambda: monitor.picture is not None and len(monitor.picture.peers) == 2)
        assert shown() == 3
        says(trainer, 4)
        wait_until(lambda: shown() == 4)
        liar.store(peer_key("run", PROGRESS_KIND), GOODBYE, ttl_s=60, subkey=liar.peer_id)
        wait_until(lambda: "left" in states())
        assert shown() == 4
        assert "restarted" not in [event.kind for event in events if isinstance(event, Happened)]
        assert {event.step for event in events if isinstance(event, StepMade)} == {3, 4}


def test_while_some_records_tell_of_a_step_and_others_do_not_yet_all_its_peers_count() -> None:
    events: list[MonitorEvent] = []
    with (
        Peer(listen=[LOOPBACK]) as here,
        Peer(here.addresses, listen=[LOOPBACK]) as first,
        Peer(here.addresses, listen=[LOOPBACK]) as second,
    ):
        monitor = RunMonitor(here, "run", events.append, refresh_s=0.5)
        here.run(monitor.start(), 5.0, "starting")

        def shown() -> set[int]:
            return {row.step for row in monitor.picture.peers} if monitor.picture is not None else set()

        def num_peers() -> list[int]:
            return [event.num_peers for event in told(events, ProgressMade)]

        store_progress(first, 3)
        store_progress(second, 3)
        wait_until(lambda: num_peers()[-1:] == [2])
        store_progress(first, 4)
        wait_until(lambda: shown() == {3, 4})
        store_progress(second, 4)
        wait_until(lambda: told(events, ProgressMade)[-1].step == 4)
        assert set(num_peers()[num_peers().index(2) :]) == {2}
        speeds = {event.samples_per_second for event in told(events, ProgressMade)[num_peers().index(2) :]}
        assert speeds == {5.0}


def test_metrics_from_before_a_run_went_back_do_not_count_in_the_steps_made_since() -> None:
    events: list[MonitorEvent] = []

    with (
        Peer(listen=[LOOPBACK]) as here,
        Peer(here.addresses, listen=[LOOPBACK]) as trainer,
        Peer(here.addresses, listen=[LOOPBACK]) as volunteer,
    ):
        monitor = RunMonitor(here, "run", events.append, refresh_s=0.5)
        here.run(monitor.start(), 5.0, "starting")

        def says(peer: Peer, step: int, lineage: bytes, loss: float) -> None:
            store_progress(peer, step, lineage)
            metrics = MetricsRecord(step, 1.5, 64, loss, 4)
            peer.run(publish_metrics(peer.dht, peer.peer_id, "run", metrics), 5.0, "publishing")
            held = HeldoutRecord(step, loss, 0.25, 0.5, 64)
            peer.run(publish_metrics(peer.dht, peer.peer_id, "run", held), 5.0, "publishing")

        says(volunteer, 3, b"x3", 16.0)
        wait_until(lambda: len(told(events, StepMade)) == 1 and told(events, HeldoutSeen))
        volunteer.store(peer_key("run", PROGRESS_KIND), GOODBYE, ttl_s=60, subkey=volunteer.peer_id)
        says(trainer, 9, b"x9", 8.0)
        wait_until(
            lambda: [event.step for event in told(events, StepMade)] == [3, 9] and len(told(events, HeldoutSeen)) == 2
        )

        says(trainer, 2, b"z2", 20.0)  # it was started anew, with an older checkpoint
        wait_until(lambda: "restarted" in [event.kind for event in told(events, Happened)])
        says(trainer, 4, b"z4", 12.0)
        wait_until(lambda: told(events, StepMade)[-1].step == 4 and told(events, HeldoutSeen)[-1].step == 4)
        assert {(event.step, event.loss) for event in told(events, StepMade)[2:]} <= {(2, 5.0), (4, 3.0)}
        assert {event.step for event in told(events, HeldoutSeen)[2:]} <= {2, 4}


def test_a_monitor_through_which_two_swarms_of_one_name_meet_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "manyhands.monitor")
    events: list[MonitorEvent] = []
    with (
        Peer(listen=[LOOPBACK]) as here,
        Peer(here.addresses, listen=[LOOPBACK]) as one,
        Peer(here.addresses, listen=[LOOPBACK]) as other,
    ):
        for trainer, target in ((one, 64), (other, 32)):
            manifest = RunManifest("manyhands/1", "run", target, [], [], "SGD", [], "", "none", {})
            value = zlib.compress(manifest.encoded())
            trainer.store(manifest_key("run"), value, ttl_s=60, subkey=trainer.peer_id)
            store_progress(trainer, 3)
        monitor = RunMonitor(here, "run", events.append, refresh_s=0.5)
        here.run(monitor.start(), 5.0, "starting")
        wait_until(lambda: told(events, ProgressMade))
        for trainer in (one, other):
            store_progress(trainer, 4)
        wait_until(lambda: told(events, ProgressMade)[-1].step == 4, "it has looked twice")
    (line,) = [record.getMessage() for record in caplog.records if "different settings" in record.getMessage()]
    assert "Two groups of peers train run run with different settings, and share no work" in line
    assert "64 at 1 peer" in line
    assert "32 at 1 peer" in line


def test_a_monitor_learns_what_was_before_from_the_coordinator_of_the_charter(tmp_path: Path) -> None:
    coordinator, owner, run_id = identity_of(92), identity_of(91), "run"
    charter = SignedCharter.sign(owner, Charter(run_id, owner.peer_id, "open", [coordinator.peer_id], created_at=1.0))
    charter.save(tmp_path / "charter")
    history = History(run_id)
    history.add_points([Point(time=1e9 + step, step=step, samples=8) for step in range(1, 6)])
    with Peer(listen=[LOOPBACK], identity=coordinator) as first:
        first.coordinate(tmp_path / "charter")
        watching = RunMonitor(first, run_id, lambda event: None, history=history)
        first.run(watching.start(), 5.0, "starting")
        with Peer(first.addresses, listen=[LOOPBACK]) as other, Peer(other.addresses, listen=[LOOPBACK]) as late:
            ticket = Ticket(run_id, (), charter=charter.digest)
            late.run(late.presence.join_run(ticket, only_looks=True), 5.0, "joining")
            asked = named_peers(late.presence, run_id)
            assert asked == [coordinator.peer_id, owner.peer_id, other.peer_id]
            exchange = Exchange(late.presence, run_id, History(run_id))
            told = late.run(exchange.ask(asked[0], 4, 1e10), 10.0, "asking")
            assert [point.step for point in told.points] == [1, 2, 3]
            with pytest.raises(Refused):
                late.run(exchange.ask(other.peer_id, 4, 1e10), 10.0, "asking")
