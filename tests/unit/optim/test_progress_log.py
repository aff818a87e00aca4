"""The line about the collaboration's progress comes at once when there is news, and else every ten seconds."""

from __future__ import annotations

import pytest

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.timing import LATE_ANSWER_S, MINUTE_S
from manyhands.optim.run.progress import Progress, ProgressLog, StrandedNotice

GROWS = Progress(64, 2, 8.0, 24.0)


def told(caplog: pytest.LogCaptureFixture, *looks: tuple[float, int, Progress]) -> list[float]:
    """The times at which there was a line."""
    log, times = ProgressLog(), []
    for now, step, progress in looks:
        caplog.clear()
        with caplog.at_level("INFO", "manyhands"):
            log.tell(step, progress, 1.0, now)
        times += [now] * len(caplog.records)
    return times


def test_growth_of_samples_alone_is_logged_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    looks = [(float(now), 0, Progress(8 * now, 2, 8.0, 100.0 - now)) for now in range(31)]
    assert told(caplog, *looks) == [0.0, 10.0, 20.0, 30.0]


@pytest.mark.parametrize(
    ("step", "news"),
    [
        (1, GROWS),  # another step
        (0, Progress(64, 3, 8.0, 24.0)),  # another number of peers
        (0, Progress(256, 2, 8.0, 0.0)),  # the target
    ],
)
def test_progress_news_is_logged_at_once_and_only_once(
    step: int, news: Progress, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(caplog, (0.0, 0, GROWS), (1.0, step, news), (2.0, step, news)) == [0.0, 1.0]


def test_the_progress_line_has_the_words_of_the_tutorials(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "manyhands"):
        ProgressLog().tell(0, Progress(64, 1, 8.0, 24.0), 0.5, 0.0)
        ProgressLog().tell(0, Progress(1, 2, 8.0, 24.0), 0.5, 0.0)
    assert caplog.messages == [
        "Collaboration accumulated 64 samples from 1 peer; ETA 24.00 seconds (refresh in 0.50s.)",
        "Collaboration accumulated 1 sample from 2 peers; ETA 24.00 seconds (refresh in 0.50s.)",
    ]


def test_a_peer_that_can_dial_no_trainer_is_warned_after_a_while_and_then_every_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notice, times = StrandedNotice("run"), []
    for now in (0.0, 0.9 * LATE_ANSWER_S, 5.0, 6.0, 5.0 + MINUTE_S):
        caplog.clear()
        notice.look([trainer_at(0), trainer_at(0)], [], now)
        times += [now] * len(caplog.records)
    assert times == [5.0, 5.0 + MINUTE_S]


def trainer_at(step: int, lineage: bytes = b"start") -> PeerRecord:
    return PeerRecord(Position(step, lineage), True, [], 30.0, samples=8, samples_per_second=1.0)


@pytest.mark.parametrize(
    ("trainers", "says"),
    [
        ([trainer_at(3), trainer_at(3)], "their gradients are kept."),
        (
            [trainer_at(0), trainer_at(3), trainer_at(3)],
            "the gradients of 2 of them, on the leading branch at step 3, are kept; the others (1 of the 3) drop",
        ),
        ([trainer_at(0), trainer_at(0, b"another")], "they began with different parameters, and drop their gradients"),
    ],
)
def test_only_those_that_have_the_state_of_the_run_are_told_that_their_gradients_are_kept(
    trainers: list[PeerRecord], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    notice = StrandedNotice("run")
    notice.look(trainers, [], 0.0)
    notice.look(trainers, [], LATE_ANSWER_S)
    assert len(caplog.messages) == 1
    assert says in caplog.messages[0]
