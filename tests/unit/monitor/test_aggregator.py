"""The pictures of a run and its history, whatever peers and other monitors say."""

from __future__ import annotations

from pathlib import Path

import msgspec

from manyhands.base.identity import PeerId
from manyhands.monitor.aggregator import Aggregator, Look
from manyhands.monitor.coordinator_exchange import Told, ToldPoint
from manyhands.monitor.credit import PATIENCE_S
from manyhands.monitor.history import History, open_history
from manyhands.monitor.monitor_events import StepMade
from manyhands.monitor.picture import Point, RunEvent
from manyhands.monitor.steps import sum_up
from manyhands.optim.metrics import AccountRecord, MetricsRecord
from manyhands.optim.run.progress import Progress

WALL_S = 1e9


def look(now: float, accounts: dict[str, AccountRecord] | None = None, step: int = 1) -> Look:
    said = {PeerId(name): account for name, account in (accounts or {}).items()}
    return Look(
        observed={}, accounts=said, trained_lately=said.keys(), step=step, progress=Progress(0, 1, 1.0, 1.0),
        target_batch_size=64, num_refused=0, now=now, wall_time=WALL_S + now,
    )  # fmt: skip


def test_numbers_of_liars_fit_into_the_history_and_are_handed_out_to_other_monitors() -> None:
    history = History("run")
    aggregator = Aggregator("run", history)
    lie = MetricsRecord(step=1, samples_per_second=1e308, samples_accumulated=2**53, loss=1.0, mini_steps=1)
    aggregator.made.append(sum_up(1, [lie] * 4096))
    account = AccountRecord(step=1, learning_rate=1e6, bytes_sent=2**53)
    aggregator.add(look(0.0, {f"peer {number}": account for number in range(4096)}))
    assert history.flush()
    (point,) = history.points()
    told = ToldPoint(**{name: getattr(point, name) for name in ToldPoint.__struct_fields__})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=ToldPoint) == told
    history.close()


def test_a_monitor_that_was_down_takes_only_the_events_of_that_time_from_others(tmp_path: Path) -> None:
    def event(time: float, text: str) -> RunEvent:
        return RunEvent(time=time, kind="joined", text=text)

    others = [event(1.0, "long before"), event(2.1, "seen by both"), event(3.0, "while it was down")]
    history = open_history("run", tmp_path)
    aggregator = Aggregator("run", history)
    aggregator.told.append(Told(events=others[:1]))
    aggregator.add(look(0.0))
    history.add_events([event(2.2, "seen by both")])
    history.close()
    history = open_history("run", tmp_path)
    aggregator = Aggregator("run", history)
    aggregator.told.append(Told(events=others))
    aggregator.told.append(Told(events=[event(3.1, "while it was down, as another monitor has seen it")]))
    aggregator.add(look(0.0))
    history.flush()
    assert [found.text for found in history.events()] == ["while it was down", "seen by both", "long before"]
    history.close()


def test_a_history_that_begins_within_the_run_says_since_when_it_counts() -> None:
    history = History("run")
    aggregator = Aggregator("run", history)
    assert aggregator.add(look(0.0, step=6))[0].committed_since is None, "nothing is counted yet"
    for step in (7, 8):
        aggregator.made.append(StepMade(step, 1.0, 1, 64, 1.0))
        assert aggregator.add(look(float(step), step=step))[0].committed_since == WALL_S + 7.0
    points = [Point(time=WALL_S - 50.0 * number, step=4 - number) for number in (1, 2, 3)]
    aggregator.told += [Told(points=points[:2]), Told(points=points[1:])]
    assert aggregator.add(look(9.0, step=8))[0].committed_since == WALL_S + 7.0
    aggregator.made.append(StepMade(9, 1.0, 1, 64, 1.0))
    assert aggregator.add(look(9.0, step=9))[0].committed_since is None, "others have told of the first step"
    assert [point.step for point in history.points()] == [1, 2, 3, 7, 8, 9], "each has filled a gap"
    history.close()


def test_points_are_removed_only_when_the_run_has_stayed_behind_them() -> None:
    def steps() -> list[int]:
        return [point.step for point in history.points()]

    history = History("run")
    aggregator = Aggregator("run", history)
    for step in range(1, 6):
        aggregator.made.append(StepMade(step, 1.0, 1, 64, 1.0))
        aggregator.add(look(float(step), step=step))
    aggregator.restarted(5, 1, WALL_S + 6)  # a newcomer is seen alone, as the others cannot be reached for a moment
    aggregator.add(look(6.0, step=1))
    aggregator.add(look(7.0, step=5))
    aggregator.add(look(7.0 + PATIENCE_S, step=5))
    history.flush()
    assert steps() == [1, 2, 3, 4, 5]
    aggregator.restarted(5, 1, WALL_S + 100)
    aggregator.made.append(StepMade(2, 2.0, 1, 64, 1.0))
    aggregator.add(look(100.0, step=2))
    aggregator.add(look(99.0 + PATIENCE_S, step=2))
    history.flush()
    assert steps() == [1, 2, 3, 4, 5]
    aggregator.add(look(100.0 + PATIENCE_S, step=2))
    history.flush()
    assert steps() == [1, 2]
    assert history.points()[-1].loss == 2.0
    history.close()
