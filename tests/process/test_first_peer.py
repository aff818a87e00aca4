"""``manyhands first-peer`` as a user starts it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import manyhands
from manyhands.base.address import Address
from tests.network import free_port
from tests.process.commands import LOOPBACK, Command, running
from tests.sweeps import few_of

pytestmark = pytest.mark.process

INTERRUPTED, USAGE = 130, 2

# the command line, and at the end which of these modules it has imported
WATCHED = """
import sys
from manyhands.cli.main import run
code = run(sys.argv[1:])
print("imported:", [name for name in ("torch", "numpy", "transformers") if name in sys.modules])
sys.exit(code)
"""


def test_a_first_peer_accepts_peers_and_logs_its_standing(tmp_path: Path) -> None:
    arguments = ["first-peer", "--listen", LOOPBACK, "--state-dir", str(tmp_path / "state")]
    events = tmp_path / "events"
    first = Command(["-c", WATCHED, *arguments, "--events", str(events)], module=None)
    try:
        addresses = first.wait_for("--initial-peers").split()[1:]
        first.wait_for("nodes in the table: 0, peers connected: 0; 0 records held")
        with manyhands.Peer(addresses, listen=["/ip4/127.0.0.1/tcp/0"]) as peer:
            assert peer.dht.num_known_peers == 1
            with running(*arguments) as second:
                assert second.wait() == USAGE
                assert "is in use by another peer" in second.output
        first.interrupt()
        assert first.wait() == INTERRUPTED, first.output
        assert "imported: []" in first.output
        assert "its id" not in first.output
    finally:
        first.close()
    said = [json.loads(line) for line in events.read_text().splitlines()]
    for event in said:
        assert event.pop("version") == 1
        assert event.pop("time") > 0
    assert said[0] == {"type": "listening", "peer_id": addresses[0].rpartition("/")[2], "addresses": addresses}
    assert said[1] | {"memory_bytes": None} == {
        "type": "standing_by",
        "num_known_peers": 0,
        "num_connected_peers": 0,
        "num_records": 0,
        "memory_bytes": None,
    }


def test_a_first_peer_that_reaches_nobody_says_so_and_begins_alone() -> None:
    with running("first-peer", "--listen", LOOPBACK, "--initial-peers", "127.0.0.1:1") as first:
        first.wait_for("No peer answers (initial peers: 1, peers seen before: 0); this peer begins alone")
        first.wait_for("records held")


@pytest.mark.long
def test_a_first_peer_without_options_keeps_its_address_and_prints_it_in_both_forms(tmp_path: Path) -> None:
    told = []
    for _ in range(2):
        with running("first-peer", "--listen", LOOPBACK, folder=tmp_path) as first:
            (multiaddr,) = first.wait_for("--initial-peers").split()[1:]
            (host_port,) = first.wait_for("--initial-peers").split()[1:]
            assert host_port == Address.parse(multiaddr).host_port
            told.append(multiaddr)
            first.wait_for("records held")
            first.interrupt()
            assert first.wait() == INTERRUPTED, first.output
            assert "at each start" not in first.output
    assert told[0] == told[1]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("listen", few_of(["{port}", "[::]:*", ":{port}", "/ip6/::/tcp/{port}"]))
def test_a_first_peer_on_all_interfaces_is_reached_by_ipv4_and_ipv6(listen: str) -> None:
    port = free_port()
    with running("first-peer", "--listen", listen.format(port=port)) as first:
        told = [Address.parse(text) for text in first.wait_for("--initial-peers").split()[1:]]
        assert {address.protocol for address in told} >= {"ip4"}
        if "*" not in listen:
            assert {address.port for address in told} == {port}
        for host in ("127.0.0.1", "[::1]"):
            with manyhands.Peer([f"{host}:{told[0].port}"], client_mode=True) as peer:
                assert peer.dht.num_known_peers == 1


def test_a_monitor_in_client_mode_names_the_peers_through_which_others_can_join() -> None:
    with (
        manyhands.Peer(listen=[LOOPBACK]) as first,
        running("monitor", "--run-id", "r", "--client-mode", "--initial-peers", *first.addresses) as monitor,
    ):
        monitor.wait_for("cannot join through this monitor")
        line = monitor.wait_for("manyhands train")
        assert line.split() == ["manyhands", "train", "--run-id", "r", "--initial-peers", *first.addresses]


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit there")
def test_a_first_peer_raises_its_limit_of_open_files() -> None:
    code = (
        "import resource as r; from manyhands.cli.open_files import raise_open_files_limit as f;"
        "hard = min(r.getrlimit(r.RLIMIT_NOFILE)[1], 4096); r.setrlimit(r.RLIMIT_NOFILE, (64, hard)); f();"
        "assert r.getrlimit(r.RLIMIT_NOFILE) == (hard, hard); f()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
