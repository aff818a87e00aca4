"""What a first peer says of itself."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import manyhands
from manyhands.cli import first_peer_command
from manyhands.cli import options as options_module
from manyhands.cli.first_peer_command import standing_of, tell_standing, what_changes
from manyhands.cli.options import NetworkOptions, PeerOptions
from manyhands.cli.output.event_file import EventWriter


def test_a_first_peer_counts_the_nodes_in_its_table_and_none_that_has_left() -> None:
    listen = ["/ip4/127.0.0.1/tcp/0"]
    with manyhands.Peer(listen=listen) as first, manyhands.Peer(first.addresses, client_mode=True):
        with manyhands.Peer(first.addresses, listen=listen):
            standing = standing_of(first)
            assert (standing.num_known_peers, standing.num_connected_peers) == (1, 2), "a client holds nothing"
        deadline = time.monotonic() + 20.0
        while standing_of(first).num_connected_peers == 2:  # its goodbye is on its way
            assert time.monotonic() < deadline
        standing = standing_of(first)
        assert (standing.num_known_peers, standing.num_connected_peers) == (0, 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"listen": ("31337",), "identity": Path("key")}, ""),
        ({"listen": ("31337",)}, "its id changes at each start (--state-dir (or --identity) keeps the id)"),
        (
            {"identity": Path("key")},
            "its port changes at each start (--state-dir, or --listen with a number above 0, keeps the port)",
        ),
        ({"state_dir": Path("state")}, ""),
        (
            {"identity": Path("key"), "tunnel": "ngrok"},
            "its address changes at each start (a tunnel has another one each time)",
        ),
    ],
)
def test_a_first_peer_says_whether_its_id_or_port_changes_at_each_start(
    options: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerOptions, "keeper", lambda self: None)  # without the package
    assert what_changes(PeerOptions(**options), has_state_dir="state_dir" in options) == expected


def test_a_machine_that_hangs_for_a_while_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first_peer_command, "CALL_TIMEOUT_S", 0.05)
    emit = EventWriter(tmp_path / "events")

    hangs = threading.Event()

    async def hang() -> None:
        hangs.set()
        time.sleep(2.0)  # noqa: ASYNC251

    with manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"]) as peer:
        hanging = threading.Thread(target=peer.run, args=(hang(), 20.0, "hanging"))
        hanging.start()
        assert hangs.wait(20.0)
        tell_standing(peer, emit)
        assert "is this machine overloaded" in caplog.text
        hanging.join(20.0)
        monkeypatch.setattr(first_peer_command, "CALL_TIMEOUT_S", 5.0)
        tell_standing(peer, emit)
    emit.close()
    assert (tmp_path / "events").read_text().count("standing_by") == 1


@pytest.mark.parametrize(("client_mode", "looks"), [(None, False), (False, True)])
def test_a_monitor_that_comes_back_looks_for_its_public_address_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client_mode: bool | None, looks: bool
) -> None:
    """It knows peers of before, and others join through it all the same; a trainer may be one of many."""
    looked: list[manyhands.Peer] = []
    monkeypatch.setattr(options_module, "announce_public", lambda peer, **_: looked.append(peer))
    listen = ("/ip4/127.0.0.1/tcp/0",)
    with manyhands.Peer(listen=listen) as first:
        with manyhands.Peer(first.addresses, listen=listen, state_dir=tmp_path):
            pass
        with NetworkOptions(client_mode=client_mode, listen=listen, state_dir=tmp_path).connect() as again:
            assert again.dht.num_known_peers == 1
            assert looked == [again] * looks
