"""For which trainers a coordinator vouches, by what it has seen."""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord
from manyhands.base.identity import PeerId
from manyhands.monitor.vouching import LONG_S, MAX_KEPT, OFF_BRANCH_S, Vouching

ANN, BOB, CAROL, EVE = (PeerId(name) for name in ("ann", "bob", "carol", "eve"))
STRANGERS = [PeerId(f"eve {number}") for number in range(20)]
LOOK_S = 3.0


def at(step: int, lineage: bytes = b"run") -> PeerRecord:
    position = Position(step, lineage if step else b"")
    return PeerRecord(position, False, [], samples_per_second=1.0, lineage_samples=8 * step)


class Watch:
    """A coordinator that looks every few seconds."""

    def __init__(self, vouching: Vouching | None = None) -> None:
        self.now = 100.0
        self.seen_s: dict[str, float] = {}
        self.vouching = vouching or Vouching(self.seen_s)

    def look(self, records: Mapping[PeerId, PeerRecord], for_s: float = LOOK_S) -> frozenset[PeerId]:
        until = self.now + for_s
        while self.now < until:
            vouched = self.vouching.look(records, self.now)
            self.now += LOOK_S
        return vouched


def test_those_are_vouched_for_who_have_been_there_for_half_of_the_longest_time() -> None:
    watch, run = Watch(), {ANN: at(1), BOB: at(1)}
    assert watch.look({}) == watch.look({ANN: at(0)}) == frozenset(), "nothing has been learnt yet"
    assert watch.look(run) == {ANN, BOB}
    watch.look(run, 600.0)
    run[CAROL] = at(1)
    assert watch.look(run, 590.0) == {ANN, BOB}
    assert watch.look(run, 30.0) == {ANN, BOB, CAROL}
    watch.look({ANN: at(2), BOB: at(2)}, 4 * LONG_S)
    assert watch.look({ANN: at(2), BOB: at(2), CAROL: at(2)}, LONG_S - 700.0) == {ANN, BOB}, "absence does not count"
    assert watch.look({ANN: at(2), BOB: at(2), CAROL: at(2)}, 700.0) == {ANN, BOB, CAROL}


def test_any_number_of_strangers_takes_no_coordinator_with_it() -> None:
    """They are on the run's branch for a while, and then elsewhere."""
    watch, run = Watch(), {ANN: at(1), BOB: at(1), CAROL: at(1)}
    watch.look(run, 3600.0)
    assert watch.look(run | dict.fromkeys(STRANGERS, at(1)), 3000.0) == run.keys()
    assert watch.look(run | dict.fromkeys(STRANGERS, at(51, b"eve")), 3600.0) == run.keys()
    again = Watch(Vouching(watch.seen_s, list(map(str, run))))
    assert again.look(run | dict.fromkeys(STRANGERS, at(51, b"eve")), 600.0) == run.keys(), "after a restart"


def test_one_that_falls_behind_is_not_vouched_for_until_it_is_back() -> None:
    watch, run = Watch(), {ANN: at(1), BOB: at(1), CAROL: at(1)}
    watch.look(run, 600.0)
    behind = {ANN: at(9), BOB: at(9), CAROL: at(1)}
    assert watch.look(behind, OFF_BRANCH_S) == run.keys(), "its record may be late"
    assert watch.look(behind, 2 * LOOK_S) == {ANN, BOB}
    assert watch.look(dict.fromkeys(run, at(10))) == run.keys()


def test_a_run_that_begins_anew_with_others_has_others_who_are_vouched_for() -> None:
    watch = Watch()
    watch.look({ANN: at(100), BOB: at(100)}, 600.0)
    assert watch.look({}, OFF_BRANCH_S + LOOK_S) == frozenset()
    assert watch.look({EVE: at(1, b"new")}) == {EVE}


def test_after_a_pause_those_count_who_were_there_for_long() -> None:
    watch, run = Watch(), {ANN: at(5), BOB: at(5)}
    watch.look(run, 600.0)
    assert watch.look({}, OFF_BRANCH_S + LOOK_S) == frozenset()
    assert watch.look({ANN: at(5), **dict.fromkeys(STRANGERS, at(51, b"eve"))}) == {ANN}


def test_a_sleep_of_the_coordinator_counts_for_little() -> None:
    watch = Watch()
    watch.look({ANN: at(1)})
    watch.now += 1e6
    watch.look({ANN: at(1)})
    assert watch.seen_s == {ANN: OFF_BRANCH_S}


def test_passers_by_are_forgotten() -> None:
    watch = Watch()
    watch.look({ANN: at(1)}, 600.0)
    for number in range(3):
        crowd = {PeerId(f"{number} {each}"): at(1) for each in range(MAX_KEPT // 2)}
        watch.look({ANN: at(1), **crowd})
        watch.look({ANN: at(1)}, 2 * OFF_BRANCH_S)
    assert ANN in watch.seen_s
    assert len(watch.seen_s) <= MAX_KEPT
