"""``--tunnel ngrok``, as users start it, with a fake of the package: a forwarder on the loopback address."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from manyhands import Peer
from manyhands.base.ticket import Ticket
from tests.process.commands import LOOPBACK, called, running

pytestmark = pytest.mark.process

USAGE = 2
FAKES = Path(__file__).parents[1] / "fakes"
REPOSITORY = Path(__file__).parents[2]
CREATED = r"Ngrok tunnel created: tcp://localhost:(\d+)$"


@pytest.fixture(autouse=True)
def ngrok(monkeypatch: pytest.MonkeyPatch) -> None:
    path = [str(FAKES), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("NGROK_AUTHTOKEN", "good-token")


@pytest.mark.parametrize(
    ("token", "arguments", "message"),
    [
        ("", ["train"], "NGROK_AUTHTOKEN is not set"),
        ("token-refused", ["first-peer"], "ERR_NGROK_105"),
        ("token-limited", ["monitor"], "ERR_NGROK_108"),
        ("token-no-card", ["first-peer"], "payment card"),
        ("good-token", ["train", "--client-mode", "--initial-peers", "127.0.0.1:9"], "--client-mode says that they"),
        ("good-token", ["monitor", "--announce", "203.0.113.7:31337"], "--announce gives another"),
    ],
)
def test_bad_tunnel_options_are_refused_in_one_line(
    token: str, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NGROK_AUTHTOKEN", token)
    monkeypatch.syspath_prepend(FAKES)
    code, output = called(*arguments, "--tunnel", "ngrok", "--listen", LOOPBACK)
    assert code == USAGE, output
    (line,) = output.strip().splitlines()
    assert message in line
    assert line.startswith("manyhands: ")


def test_a_first_peer_says_the_address_of_the_tunnel_and_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NGROK_DROP_FILE", str(tmp_path / "drop"))
    with running("first-peer", "--tunnel", "ngrok", "--listen", LOOPBACK) as command:
        created = re.search(CREATED, command.wait_for("Ngrok tunnel created").strip())
        assert created
        line = command.wait_for("--initial-peers")
        assert line.split()[1].startswith(f"/dns4/localhost/tcp/{created[1]}/p2p/12D3KooW")
        with Peer(line.split()[1:], client_mode=True) as peer:
            assert peer.dht.num_known_peers
        (tmp_path / "drop").touch()
        command.wait_for("has dropped")
        again = re.search(CREATED, command.wait_for("Ngrok tunnel created").strip())
        assert again
        assert again[1] != created[1]
        ticket = Ticket.parse(command.wait_for("manyhands join mh1").split()[-1])
        assert [address.port for address in ticket.addresses] == [int(again[1])]
        with Peer(command.wait_for("--initial-peers").split("--initial-peers")[1].split(), client_mode=True) as peer:
            assert peer.dht.num_known_peers
        command.interrupt()
        assert command.wait() == 130


@pytest.mark.long
def test_a_monitor_and_a_trainer_behind_tunnels_train_with_a_client(tmp_path: Path) -> None:
    from tests.process.test_firewalled import TINY

    text = tmp_path / "text"
    text.write_text("\n\n".join(f"Number {n} is here. After it comes number {n + 1}." for n in range(600)))
    tunnel = ("--tunnel", "ngrok", "--listen", LOOPBACK)
    stop_file = tmp_path / "stop"  # three steps take the first trainer less time than the other one takes to come
    common = (*TINY, "--text", str(text), "--batch-size", "4", "--slow-down", "20", "--stop-file", str(stop_file))
    with running("monitor", "--run-id", "r", *tunnel) as monitor:
        address = monitor.wait_for("manyhands train").split()[-1]
        joining = ("train", "--run-id", "r", "--initial-peers", address, *common)
        with running(*joining, "--start-new", *tunnel) as trainer, running(*joining, "--client-mode") as client:
            for command in (trainer, client):
                command.wait_for("Averaged tensors successfully with 2 peers")
            stop_file.write_text("1")  # global step, which they have passed
            for command in (trainer, client):
                assert command.wait() == 0
