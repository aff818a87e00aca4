"""Numbers of things, as people write them."""

from __future__ import annotations

from manyhands.base.text import counted, rough


def test_one_peer_is_no_peers() -> None:
    assert [counted(number, "peer") for number in (0, 1, 2)] == ["0 peers", "1 peer", "2 peers"]


def test_durations_are_as_exact_as_people_need_them() -> None:
    assert [rough(seconds) for seconds in (0.2, 99.4, 100.0, 720.0, 20_000.0)] == [
        "0 s", "99 s", "2 min", "12 min", "5.6 h",
    ]  # fmt: skip
