"""What a peer keeps in its state dir, and that the folder is its own."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import manyhands
from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, JoinFailed
from manyhands.dht import KnownPeers
from manyhands.dht.known_peers import VERSION
from manyhands.state_dir import StateDir
from tests.network import identity_of

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


def test_a_peer_keeps_its_id_and_comes_back_by_the_peers_it_knew(tmp_path: Path) -> None:
    with (
        manyhands.Peer(listen=LOOPBACK) as coordinator,
        manyhands.Peer(coordinator.addresses, listen=LOOPBACK) as other,
    ):
        with manyhands.Peer(coordinator.addresses, listen=LOOPBACK, state_dir=tmp_path / "a" / "b") as peer:
            peer_id = peer.peer_id
        assert (tmp_path / "a" / "b" / "identity.pem").stat().st_mode & 0o077 == 0
        coordinator.close()
        with manyhands.Peer(listen=LOOPBACK, state_dir=tmp_path / "a" / "b") as peer:
            assert peer.peer_id == peer_id
            assert [contact.peer_id for contact in peer.dht.contacts()] == [other.peer_id]


def test_a_peer_keeps_its_port_where_any_will_do(tmp_path: Path) -> None:
    with manyhands.Peer(listen=LOOPBACK, state_dir=tmp_path) as peer:
        addresses = peer.addresses
    with manyhands.Peer(listen=LOOPBACK, state_dir=tmp_path) as peer:
        assert peer.addresses == addresses, "whoever has a ticket of before can use it"
    with manyhands.Peer(listen=["127.0.0.1:0", "127.0.0.1:0"], state_dir=tmp_path) as peer:
        assert len(peer.addresses) == 2, "one port cannot serve twice"


def test_a_port_that_is_taken_since_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manyhands.Peer(listen=LOOPBACK, state_dir=tmp_path) as peer:
        port = Address.parse(peer.addresses[0]).port
    with socket.create_server(("127.0.0.1", port)), manyhands.Peer(listen=LOOPBACK, state_dir=tmp_path) as peer:
        other_port = Address.parse(peer.addresses[0]).port
        assert other_port != port
        (warning,) = caplog.messages
        assert f"Port {port} of the last start is taken" in warning
    with manyhands.Peer(listen=LOOPBACK, state_dir=tmp_path) as peer:
        assert Address.parse(peer.addresses[0]).port == other_port, "the last one counts"


@pytest.mark.parametrize("content", [b"", b"\xff", b"70000", b"0", b"-1", b"1e3"])
def test_a_damaged_port_file_is_written_anew(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "port").write_bytes(content)
    with manyhands.Peer(listen=LOOPBACK, state_dir=tmp_path) as peer:
        assert (tmp_path / "port").read_text() == str(Address.parse(peer.addresses[0]).port)
    assert not caplog.messages


def test_a_peer_joins_by_the_peers_in_its_state_dir_if_no_initial_peer_answers(tmp_path: Path) -> None:
    nobody = "/ip4/127.0.0.1/tcp/1"
    with manyhands.Peer(listen=LOOPBACK) as other:
        manyhands.Peer(other.addresses, listen=LOOPBACK, state_dir=tmp_path).close()
        with manyhands.Peer([nobody], listen=LOOPBACK, state_dir=tmp_path) as peer:
            assert peer.dht.num_known_peers == 1
    with pytest.raises(JoinFailed, match="the initial peer could not be reached"):
        manyhands.Peer([nobody], listen=LOOPBACK, state_dir=tmp_path)
    with manyhands.Peer([nobody], listen=LOOPBACK, state_dir=tmp_path, must_join=False) as peer:
        assert peer.dht.num_known_peers == 0


UNCLOSED = """
import os, sys
import manyhands
first = manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"])
peer = manyhands.Peer(first.addresses, listen=["/ip4/127.0.0.1/tcp/0"], state_dir=sys.argv[1])
if hasattr(os, "fork"):
    child = os.fork()
    if child == 0:
        sys.exit()  # as a user's child would, through all handlers
    assert os.waitpid(child, 0)[1] == 0
try:
    manyhands.Peer(state_dir=sys.argv[1])
except ValueError:
    print("still in use")
"""


@pytest.mark.process
def test_a_script_that_never_closes_its_peer_keeps_the_folder_to_the_end_and_saves_what_it_knows(
    tmp_path: Path,
) -> None:
    script = subprocess.run(
        [sys.executable, "-c", UNCLOSED, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    err = "\n".join(
        line for line in script.stderr.splitlines() if "multi-threaded" not in line and "fork()" not in line
    )
    assert (script.returncode, script.stdout, err) == (0, "still in use\n", "")
    assert len(KnownPeers.from_json((tmp_path / "peers.json").read_bytes(), 0.0)) == 1


def test_two_peers_cannot_share_a_state_dir(tmp_path: Path) -> None:
    in_use = r"is in use by another peer; .* a state dir of its own"
    with manyhands.Peer(listen=LOOPBACK, state_dir=tmp_path), pytest.raises(ConfigError, match=in_use):
        manyhands.Peer(listen=LOOPBACK, state_dir=tmp_path)
    manyhands.Peer(listen=LOOPBACK, state_dir=tmp_path).close()


def test_a_peer_that_cannot_start_lets_go_of_its_state_dir(tmp_path: Path) -> None:
    with pytest.raises(JoinFailed):
        manyhands.Peer(["127.0.0.1:1"], listen=LOOPBACK, state_dir=tmp_path)
    (tmp_path / "identity.pem").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"identity\.pem is not an unencrypted PEM"):
        manyhands.Peer(listen=LOOPBACK, state_dir=tmp_path)
    StateDir(tmp_path).close()


def test_a_named_identity_counts_more_than_that_of_the_state_dir(tmp_path: Path) -> None:
    with manyhands.Peer(listen=LOOPBACK, state_dir=tmp_path, identity=identity_of(5)) as peer:
        assert peer.peer_id == identity_of(5).peer_id
    assert not (tmp_path / "identity.pem").exists()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        StateDir(file)
    with pytest.raises(ConfigError, match="name a folder that can be written"):
        StateDir(file / "below")


@pytest.mark.parametrize("content", [b"", b"{\x00", b'{"version": 99, "peers": []}', b" " * ((1 << 20) + 1)])
def test_a_damaged_file_is_one_warning(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(content)
    with manyhands.Peer(listen=LOOPBACK, state_dir=tmp_path) as peer:
        assert len(caplog.record_tuples) == 1
        name, level, text = caplog.record_tuples[0]
        assert (name, level) == ("manyhands.state_dir", logging.WARNING)
        assert text.startswith(f"The known peers in {path} are ignored: it ")
        manyhands.Peer(peer.addresses, listen=LOOPBACK).close()
    assert msgspec.json.decode(path.read_bytes())["version"] == VERSION, "it was written anew"


def test_a_write_of_the_peers_file_that_is_killed_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader at any moment sees one state or the other: the new one is renamed into place."""
    state_dir = StateDir(tmp_path)
    state_dir.save_peers(b"before")
    monkeypatch.setattr(Path, "replace", lambda draft, target: pytest.fail("killed here") if target.exists() else None)
    with pytest.raises(pytest.fail.Exception):
        state_dir.save_peers(b"after")
    assert state_dir.peers_path.read_bytes() == b"before"
    state_dir.close()
