"""--relay and --relay-mbit-s: who relays by default, and what is refused."""

from __future__ import annotations

import pytest

from manyhands.base.errors import ConfigError
from manyhands.cli.options import RELAY_MBIT_S, NetworkOptions, PeerOptions


@pytest.mark.parametrize(
    ("given", "relays", "mbit_s"),
    [
        ({}, True, RELAY_MBIT_S),  # a first peer
        ({}, False, None),  # a trainer
        ({"relay": True}, False, RELAY_MBIT_S),
        ({"relay": False}, True, None),
        ({"relay_mbit_s": 7.0}, False, 7.0),  # a rate alone says that it relays
        ({"relay": True, "relay_mbit_s": 7.0}, False, 7.0),
    ],
)
def test_coordinators_relay_by_default_and_trainers_if_asked(
    given: dict[str, object], relays: bool, mbit_s: float | None
) -> None:
    options = PeerOptions(**given)  # type: ignore[arg-type]
    assert options.rpc_config(relays=relays).relay_mbit_s == mbit_s


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"relay_mbit_s": 0.0}, "must be above 0, or write --no-relay"),
        ({"relay_mbit_s": -1.0}, "must be above 0"),
        ({"relay": False, "relay_mbit_s": 5.0}, "--no-relay forwards nothing; leave one out"),
        ({"relay": True, "client_mode": True}, "--client-mode says that they cannot"),
        ({"relay_mbit_s": 5.0, "client_mode": True}, "--client-mode says that they cannot"),
    ],
)
def test_contradictions_are_refused_in_one_line(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        NetworkOptions(**given)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
