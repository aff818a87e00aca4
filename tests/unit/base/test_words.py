"""Numbers of things, as people write them."""

from __future__ import annotations

from manyhands.base.words import counted


def test_one_peer_is_no_peers() -> None:
    assert [counted(number, "peer") for number in (0, 1, 2)] == ["0 peers", "1 peer", "2 peers"]
