"""Whom a monitor asks for the history, and answers that it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from manyhands.monitor.coordinator_exchange import HistoryResponse, named_peers


@pytest.mark.parametrize(
    ("coordinators", "initial_peers", "asked"),
    [
        ([], [], []),
        ([], ["b", "own", "a"], ["a", "b"]),
        (["y", "own", "x"], [], ["y", "x"]),
        (["y", "x"], ["x", "a"], ["y", "x", "a"]),
    ],
)
def test_the_coordinators_of_the_charter_and_the_initial_peers_are_asked(
    coordinators: list[str], initial_peers: list[str], asked: list[str]
) -> None:
    members = {"run": SimpleNamespace(charter=SimpleNamespace(coordinators=coordinators))} if coordinators else {}
    dht = SimpleNamespace(initial_peers=lambda: frozenset(initial_peers))
    presence: Any = SimpleNamespace(peer_id="own", members=members, dht=dht)
    assert named_peers(presence, "run") == asked


@pytest.mark.parametrize(
    "wrong",
    [
        {"points": [[1.0, 1, float("nan"), None, 1, 1.0, 1, None, None]]},
        {"points": [[1.0, -1, None, None, 1, 1.0, 1, None, None]]},
        {"steps": [[1, b"x" * 9, b""]]},
        {"events": [[1.0, "no such kind", "text", 1, "", ""]]},
        {"events": [[1.0, "joined", "x" * 1001, 1, "", ""]]},
        {"peers": [["id", "a\x1b[2Jb"]]},
        {"points": [[1.0, 1, None, None, 1, 1.0, 1, None, None]] * 2001},
    ],
)
def test_a_hostile_answer_does_not_decode(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=HistoryResponse)
