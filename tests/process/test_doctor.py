"""``manyhands doctor`` as a user runs it."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.base.address import Address
from manyhands.base.identity import Identity
from manyhands.base.ticket import Ticket
from tests.process.commands import LOOPBACK, address_of, called, running

pytestmark = pytest.mark.process

ALL_WELL, BROKEN = 0, 1


class Silent(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def web_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        yield f"/ip4/127.0.0.1/tcp/{server.server_address[1]}"
        server.shutdown()
        thread.join(5.0)


@pytest.mark.long
def test_doctor_passes_a_good_set_up_and_fails_a_broken_one(web_server: str, tmp_path: Path) -> None:
    with running("monitor", "--run-id", "r", "--listen", LOOPBACK) as monitor:
        address = address_of(monitor)
        with running("doctor", "--initial-peers", address, "--listen", LOOPBACK) as doctor:
            assert doctor.wait() == ALL_WELL, doctor.output
        lines = doctor.output.splitlines()
        assert lines[0] == address
        assert any(line.startswith("  ok    dial back") for line in lines)
        assert lines[-1] == "All is well: a peer with these options can join."

        state_dir = tmp_path / "state"
        options = ["--initial-peers", address, "--client-mode", "--state-dir", str(state_dir)]
        with running("doctor", "--json", *options) as doctor:
            assert doctor.wait() == ALL_WELL, doctor.output
        own = Identity.load_or_create(state_dir / "identity.pem")
        assert json.loads(doctor.output)["peer_id"] == own.peer_id, "it goes about it as the peer of that folder"

        nobody = "/ip4/127.0.0.1/tcp/1"
        with running("doctor", "--json", "--initial-peers", address, web_server, nobody, "--client-mode") as doctor:
            assert doctor.wait() == BROKEN, doctor.output
        report = json.loads(doctor.output)
        assert not report["ok"]
        assert report["can_join"]
        failed = [(check["address"], check["check"]) for check in report["checks"] if check["ok"] is False]
        assert failed == [(web_server, "tls"), (nobody, "tcp")]
        assert all(check["advice"] for check in report["checks"] if check["ok"] is False)


def test_a_ticket_names_the_run_to_look_for() -> None:
    with running("monitor", "--run-id", "r", "--listen", LOOPBACK) as monitor:
        address = Address.parse(address_of(monitor))
        code, output = called("doctor", str(Ticket("another", [address])), "--client-mode")
        assert code == BROKEN
        assert "none of them is in run 'another'; runs here: 'r'" in " ".join(output.split())
        code, output = called("doctor", str(Ticket("r", [address])), "--client-mode")
        assert code == ALL_WELL, output
        assert "ok    run            run 'r' exists, but no peer trains in it yet" in output
        code, output = called("doctor", str(Ticket("r", [address])), "--run-id", "another")
        assert (code, output) == (
            2, "manyhands: the ticket is for run 'r', and --run-id is 'another'; leave --run-id out\n",
        )  # fmt: skip
