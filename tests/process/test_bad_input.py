"""Wrong input gives one clear line and exit code 2, and leaves nothing running."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.process.commands import LOOPBACK, STARTUP_S, address_of, called, running

pytestmark = pytest.mark.process

USAGE = 2
PLAN = ["plan", "--mbit", "50", "--samples-per-s", "20", "--target-batch-size", "4096", "--peers", "40"]
PLAN_OF_18M = [*PLAN[:-2], "--params", "18M"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["monitor", "--run-id", "my.run"], "run_id 'my.run' has a '.'"),
        (["train", "--run-id", ""], "run_id is empty"),
        (["monitor", "--run-id", ""], "run_id is empty"),
        (["train", "--run-id", "x" * 65], "has 65 characters; at most 64 fit"),
        (["train", "--run-id", "r", "--initial-peers", "nonsense"], "cannot read address 'nonsense'"),
        (["train", "--run-id", "r", "--initial-peers", ""], "--initial-peers is given without an address"),
        (["train", "--run-id", "r", "--initial-peers", "--threads", "1"], "a variable of the shell is probably unset"),
        (["monitor", "--run-id", "r", "--initial-peers"], "write --initial-peers HOST:PORT or a multiaddr"),
        (["first-peer", "--initial-peers="], "--initial-peers is given without an address"),
        (["first-peer", "--listen", ""], "--listen is given without an address"),
        (["doctor", "--initial-peers"], "or a variable of the shell is unset"),
        (["train", "--run-id", "r", "--client-mode"], "in client mode cannot be the first one"),
        (["train", "--run-id", "r", "--client-mode", "--announce", "1.2.3.4:5"], "--client-mode says that they cannot"),
        (["train", "--run-id", "r", "--client-mode", "--listen", "31337"], "--client-mode only dials out; leave one"),
        (["monitor", "--run-id", "r", "--no-port-mapping", "--port_mapping"], "--port_mapping specified multiple"),
        (["train", "--run-id", "r", "--run-id", "s"], "Parameter --run-id specified multiple times"),
        (["monitor", "--run-id", "r", "--client-mode"], "give it the address of a peer that accepts connections"),
        (["train", "--run-id", "r", "--initial-peers", "http://host:1"], "write it without http://, like host:1"),
        (["train", "--run-id", "r", "--initial-peers", "31337"], "'31337' has no host"),
        (["train", "--run-id", "r", "--text", "/no/such/file"], "/no/such/file"),
        (["train", "--run-id", "r", "--batch-size", "0"], "batch_size is 0; it must be at least 1"),
        (["train", "--run-id", "r", "--batch_size=1.5"], "--batch_size is '1.5'; it must be a whole number"),
        (["train", "--run-id", "r", "--device", "nonsense"], "device 'nonsense' is unknown; write auto, cpu, cuda,"),
        (["join", "127.0.0.1:9", "--device", "cuda:"], "device 'cuda:' is unknown"),
        (["evaluate", "--initial-peers", "127.0.0.1:9", "--device", "gpu"], "device 'gpu' is unknown"),
        (["train", "--run-id", "r", "--precision", "float8"], "float8"),
        (["demo", "--peers", "0"], '"0" for --peers. Must be >= 1'),
        (["demo", "--liar", "maybe"], '"maybe" for --liar. Choose from: "sign-flip", "mean-flip"'),
        (["demo", "--liar", "mean-flip", "--peers", "2"], "one of two members can set any mean"),
        (["demo", "--text", "/no/such/file"], "/no/such/file"),
        (["demo", "--summary", "/no/such/folder/file"], "--summary /no/such/folder/file"),
        ([*PLAN, "--params", "0"], "params=0 must be at least 1"),
        (
            [*PLAN, "--params", "many"],
            "--params is 'many'; it must be a number above 0, for example 18M, 1.5B or 110000",
        ),
        ([*PLAN, "--params=-5M"], "--params is '-5M'; it must be a number above 0"),
        ([*PLAN_OF_18M, "--peers", "0"], "peers=0 must be at least 2"),
        ([*PLAN_OF_18M, "--peers", "-3"], "peers=-3 must be at least 2"),
        ([*PLAN_OF_18M, "--peers", "some"], "--peers is 'some'; it must be a whole number"),
        ([*PLAN_OF_18M, "--peers", "4", "--rtt-ms", "nan"], "rtt_ms=nan must be a finite number of at least 0"),
        (["train", "--run-id", "r", "--name", "x" * 33], "it must have 1 to 32 printable characters"),
        (["train", "--run-id", "r", "--name", ""], "name '' cannot be used"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = called(*arguments)
    assert code == USAGE
    assert message in output
    assert len(output.strip().splitlines()) == 1, output


def test_an_unknown_command_is_refused_in_one_line() -> None:
    """As a process: what it imports and its exit say no more either."""
    with running("frobnicate") as command:
        assert command.wait() == USAGE
        assert "frobnicate" in command.output
        assert len(command.output.strip().splitlines()) == 1, command.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ein schöner Satz.".encode("latin-1"), "UTF-8"),
        (b"One short sentence. And another one.\n", "too short"),  # for one batch
    ],
)
def test_a_text_that_cannot_be_trained_on_is_refused_in_one_line(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(text)
    code, output = called("demo", "--text", str(path))
    assert code == USAGE
    assert message in output
    assert len(output.strip().splitlines()) == 1, output


@pytest.mark.parametrize(
    "command", [["train", "--run-id", "r"], ["join", "127.0.0.1:9"], ["evaluate", "--initial-peers", "127.0.0.1:9"]]
)
def test_a_text_that_is_too_short_is_told_before_anything_is_started(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.txt"
    path.write_text("One short sentence. And another one.\n" * 10)
    code, output = called(*command, "--text", str(path))
    assert (code, len(output.strip().splitlines())) == (USAGE, 1)
    assert "the text is too short: it has 350 characters" in output
    assert "give more text" in output
    assert [entry.name for entry in tmp_path.iterdir()] == ["text.txt"]


def test_a_taken_port_is_refused_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = called("monitor", "--run-id", "r", "--listen", f"/ip4/127.0.0.1/tcp/{port}")
        assert code == USAGE
        assert f"port {port} is taken" in output
        assert not list(tmp_path.iterdir()), "a start that failed leaves nothing"
        code, output = called("train", "--run-id", "r", "--listen", f"/ip4/127.0.0.1/tcp/{port}")
        assert (code, f"port {port} is taken" in output) == (USAGE, True)
        assert not list(tmp_path.iterdir())
        (tmp_path / "manyhands-r.monitor").mkdir()
        called("monitor", "--run-id", "r", "--listen", f"/ip4/127.0.0.1/tcp/{port}")
        assert (tmp_path / "manyhands-r.monitor" / "identity.pem").exists(), "its folder was there"


@pytest.mark.long
def test_initial_peers_that_cannot_be_reached_are_named_with_their_reasons() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        running("monitor", "--run-id", "r", "--listen", LOOPBACK) as m,
    ):
        address = address_of(m)
        somebody_else = address.rpartition("/")[0] + "/12D3KooWGqUJrB2Fa3jSMjKHvDoipnrz9iCfySyFL7BAUKvHfugH"
        nowhere = "/ip4/127.0.0.1/tcp/1"
        quiet = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}"
        started = time.monotonic()
        code, output = called("train", "--run-id", "r", "--initial-peers", somebody_else, nowhere, quiet)
        assert code == USAGE
        assert time.monotonic() - started < 10 + STARTUP_S
        *_, head, first, second, third = output.strip().splitlines()
        assert "none of the 3 initial peers could be reached" in head
        assert somebody_else in first
        assert "another identity answered" in first
        assert f"{nowhere}: connection refused" in second
        assert f"{quiet}: timed out" in third


class Silent(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("there", ["nobody", "a web server", "a port that says nothing"])
def test_an_address_where_no_peer_answers_is_refused_in_one_line_and_in_time(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        http.server.HTTPServer(("127.0.0.1", 0), Silent) as web,
    ):
        threading.Thread(target=web.serve_forever, daemon=True).start()
        port, why = {
            "nobody": (1, "connection refused: nothing listens on that port"),
            "a web server": (web.server_port, "not a manyhands peer"),
            "a port that says nothing": (
                listening.getsockname()[1],
                "another program listens there, or the peer hangs",
            ),
        }[there]
        started = time.monotonic()
        code, output = called("monitor", "--run-id", "r", "--initial-peers", f"127.0.0.1:{port}")
        assert code == USAGE
        assert time.monotonic() - started < 10 + STARTUP_S
        assert "the initial peer could not be reached" in output
        assert why in output
        assert len(output.strip().splitlines()) == 1, output
        assert not list(tmp_path.iterdir())
        web.shutdown()


def test_a_device_that_is_not_there_is_told_before_anybody_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = called("train", "--run-id", "r", "--device", "cuda:77")
    assert code == USAGE
    assert "device 'cuda:77' cannot be used here" in output.strip().splitlines()[-1]
    assert "Others can join" not in output


@pytest.mark.long
def test_another_model_is_refused_with_both_sizes() -> None:
    common = ("train", "--run-id", "r", "--threads", "1")
    with running(*common, "--listen", LOOPBACK) as first:
        address = first.wait_for("Others can join").split()[-1]
        first.wait_for("Collaboration accumulated")
        with running(*common, "--initial-peers", address, "--listen", LOOPBACK, "--hidden-size", "128") as other:
            assert other.wait() == USAGE
        assert "does not fit run 'r': hidden_size is 128 here, 256 in the run" in other.output
