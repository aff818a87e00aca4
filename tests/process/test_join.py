"""``manyhands join`` takes the whole recipe from the run, and says at once what cannot work."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock

import msgspec
import pytest

from manyhands import Peer
from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PROGRESS_KIND, PeerRecord, peer_key
from manyhands.base.address import Address
from manyhands.base.ticket import Ticket
from manyhands.optim.manifest import ManifestKeeper, RunManifest
from manyhands.optim.run.run_records import Beginning, declare_run
from manyhands.recipes.albert.adoption import RunRecipe, facts_of
from manyhands.recipes.albert.config import AlbertRecipe
from tests.process.commands import LOOPBACK, STARTUP_S, Command, address_of, called, running

pytestmark = pytest.mark.process

USAGE = 2
SOON_S = 10.0
SMALL = (
    "--hidden-size", "48", "--num-attention-heads", "3", "--intermediate-size", "64", "--num-hidden-layers", "1",
    "--seq-length", "32", "--vocab-size", "600", "--learning-rate", "0.02", "--target-batch-size", "24",
)  # fmt: skip
HUGE = AlbertRecipe(hidden_size=1 << 17, intermediate_size=1 << 19, vocab_size=30_000)
LISTEN = ("--listen", LOOPBACK)
COMMON = (*LISTEN, "--threads", "1")
WITHOUT_TEXT = (*COMMON, "--any-text")


def wait_for_usage_error(command: Command, started: float) -> str:
    assert command.wait() == USAGE, command.output
    assert time.monotonic() - started < SOON_S + STARTUP_S
    return command.output.strip().splitlines()[-1]


@pytest.mark.long
def test_commands_started_in_one_folder_without_an_address_find_each_other(tmp_path: Path) -> None:
    with running("monitor", *LISTEN, folder=tmp_path) as monitor:
        monitor.wait_for("Running DHT root at 127.0.0.1:")
        with running("train", *COMMON, folder=tmp_path) as first:
            first.wait_for("A peer of run albert runs in this folder (manyhands-albert.monitor)")
            peer_id = first.wait_for("Beginning run albert as peer").split()[-1]
            with running("train", *COMMON, folder=tmp_path) as second:
                second.wait_for(f"Peer {peer_id} begins run albert: waiting for its settings")
            monitor.interrupt()
            monitor.wait()
            with running("train", *COMMON, folder=tmp_path) as third:
                third.wait_for("A peer of run albert runs in this folder (manyhands-albert)")
    with running("train", *COMMON, folder=tmp_path) as alone:
        alone.wait_for("Beginning run albert as peer")
    assert "runs in this folder" not in alone.output, "nobody does any more"


@pytest.mark.long
def test_a_run_that_only_its_monitor_knows_is_begun_and_not_joined() -> None:
    with running("monitor", "--run-id", "quiet", "--listen", LOOPBACK) as monitor:
        address = address_of(monitor)
        with running("join", address, *COMMON) as newcomer:
            line = wait_for_usage_error(newcomer, time.monotonic())
        assert "nobody trains in run 'quiet', so there is nothing to join; to begin it, or to go on from" in line
        with running("train", "--initial-peers", address, *COMMON, *SMALL) as first:
            first.wait_for("Step 1")


@pytest.mark.long
@pytest.mark.parametrize("command", [("join",), ("train", "--initial-peers")], ids=["join", "train"])
def test_a_trainer_that_starts_while_another_one_begins_the_run_waits_for_its_settings(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    own = (*COMMON, "--batch-size", "4")
    with running("train", *own, *SMALL, folder=tmp_path) as first:
        first.wait_for("Beginning run albert as peer")
        address = first.wait_for("Others can join through this peer").split()[-1]
        with running(*command, address, *own) as second:
            second.wait_for("begins run albert: waiting for its settings")
            second.wait_for("Joining run albert as peer")
            second.wait_for("Others can join this run with one word")  # it fits the run


@pytest.mark.long
def test_a_newcomer_is_told_that_the_peer_that_began_the_run_has_left() -> None:
    with Peer(listen=[LOOPBACK]) as peer:
        beginning = Beginning(peer.dht, peer.peer_id, "gone")

        async def begin() -> bool:
            declare_run(peer.dht, "gone")
            return await beginning.announce()

        assert peer.run(begin(), 5.0, "announcing")
        with running("join", peer.addresses[0], *COMMON) as newcomer:
            newcomer.wait_for("begins run gone: waiting for its settings")
            peer.run(beginning.close(), 5.0, "leaving")
            assert newcomer.wait() == USAGE
    assert "the peer that began run 'gone' has left it again" in newcomer.output.strip().splitlines()[-1]


def sign(peer: Peer, **extra: str) -> None:
    """Have a run whose manifest has these facts, and somebody who trains in it."""
    manifest = RunManifest("manyhands/1", "odd", 64, [], [], "Lamb", [], "", "none", extra)
    keeper = ManifestKeeper(peer.dht, peer.peer_id, manifest, may_begin=AsyncMock(), expected=b"")

    record = PeerRecord(Position(0, b""), False, [], 60.0, samples_per_second=1.0)

    async def keep() -> None:
        await keeper.agree()
        await peer.dht.store(
            peer_key("odd", PROGRESS_KIND), msgspec.to_builtins(record, builtin_types=(bytes,)), 60.0, peer.peer_id
        )
        peer.presence.on_close.append(keeper.close)

    peer.run(keep(), 5.0, "signing")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"recipe": "albert 99"}, "trains recipe 'albert 99', which this version does not know"),
        ({}, "was begun by another program"),
        (
            facts_of(RunRecipe(recipe=HUGE, tokenizer="digest", vocab_size=30_000)),
            "too little memory for the model of run 'odd': its",
        ),
    ],
)
def test_a_run_whose_recipe_cannot_be_trained_here_is_refused(facts: dict[str, str], message: str) -> None:
    with Peer(listen=[LOOPBACK]) as peer:
        sign(peer, **facts)
        started = time.monotonic()
        code, output = called("join", peer.addresses[0], *COMMON)
        assert code == USAGE
        assert time.monotonic() - started < SOON_S + STARTUP_S
    assert message in output
    assert len(output.strip().splitlines()) == 1, output


# with a trainer that computes until the last of these tests: they come last, so that it runs no longer than needed


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Command, str, str]]:
    """A trainer of a run with settings of its own; its address, and its ticket."""
    text = tmp_path_factory.mktemp("text") / "other.txt"
    text.write_text(
        "".join(f"Sentence number {n} of this text is here. It has another one behind it.\n\n" for n in range(3000))
    )
    with running("train", "--run-id", "runA", *COMMON, *SMALL, "--text", str(text)) as command:
        address = command.wait_for("Others can join through this peer").split()[-1]
        ticket = command.wait_for("manyhands join mh1").split()[-1]
        yield command, address, ticket


@pytest.mark.long
def test_a_joiner_without_the_text_of_the_run_is_told_and_trains_on_no_other(
    trainer: tuple[Command, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, address, _ = trainer
    monkeypatch.chdir(tmp_path)
    for command in (["join", address], ["train", "--initial-peers", address], ["evaluate", "--initial-peers", address]):
        code, output = called(*command, *COMMON)
        assert code == USAGE
        line = output.strip().splitlines()[-1]
        assert re.search(r"run 'runA' trains on data with digest [0-9a-f]{12}, which is not on this machine", line)
        assert line.endswith("or train on other text (the documentation that comes with Python) with --any-text")
    assert not list(tmp_path.iterdir())
    assert re.search(r"Training on \d+ samples of .*other.txt; 64 others are held out", first.output)


@pytest.mark.long
def test_join_with_one_address_adopts_the_model_of_the_run_and_contributes(
    trainer: tuple[Command, str, str], tmp_path: Path
) -> None:
    _, address, _ = trainer
    host_port = f"127.0.0.1:{Address.parse(address).port}"
    with running("join", host_port, *WITHOUT_TEXT, folder=tmp_path) as newcomer:
        newcomer.wait_for("Run 'runA' trains on data with digest ")
        assert "documentation that comes with Python 3" in newcomer.wait_for("Training on")
        newcomer.wait_for("A short trial chose")
        newcomer.wait_for("Averaged tensors successfully with 2 peers")
        assert re.search(r"[1-9]\d* samples", newcomer.wait_for("Your current contribution"))
        newcomer.interrupt()
        newcomer.wait()
    assert "Training the tokenizer" not in newcomer.output, "it came from the run, whose text is not here"
    folder = tmp_path / "manyhands-runA"
    assert (folder / "identity.pem").exists()
    assert list(folder.glob("checkpoint-*/model.safetensors"))


@pytest.mark.long
def test_a_ticket_joins_and_a_restart_is_the_same_peer(trainer: tuple[Command, str, str], tmp_path: Path) -> None:
    _, _, ticket = trainer
    peer_ids = []
    for _ in range(2):
        with running("join", ticket, *WITHOUT_TEXT, "--batch-size", "4", folder=tmp_path) as newcomer:
            peer_ids.append(newcomer.wait_for("Joining run runA as peer").split()[-1])
            newcomer.wait_for("Your current contribution")
            newcomer.interrupt()
            newcomer.wait()
    assert peer_ids[0] == peer_ids[1]


@pytest.mark.long
def test_two_trainers_started_in_one_folder_use_a_state_folder_each(trainer: tuple[Command, str, str]) -> None:
    first, address, _ = trainer
    with running("train", "--run-id", "runA", "--initial-peers", address, *WITHOUT_TEXT, folder=first.folder) as second:
        second.wait_for("Joining run runA")
        assert first.folder is not None
        assert sorted(path.name for path in first.folder.iterdir()) == ["manyhands-runA", "manyhands-runA-2"]


@pytest.mark.long
def test_train_adopts_the_settings_of_the_run_and_refuses_options_that_differ(
    trainer: tuple[Command, str, str],
) -> None:
    _, address, _ = trainer
    start = ("train", "--initial-peers", address, *WITHOUT_TEXT)
    with running(*start, "--learning-rate", "0.1", "--hidden-size", "96") as other:
        line = wait_for_usage_error(other, time.monotonic())
    assert "hidden_size is 96 here, 48 in the run; learning_rate is 0.1 here, 0.02 in the run" in line
    assert "Loading PyTorch" not in other.output

    with running(*start, "--hidden-size", "48", "--seed", "7", "--no-checkpoints") as newcomer:
        newcomer.wait_for("Averaged tensors successfully with 2 peers")


@pytest.mark.long
def test_a_mistyped_run_id_is_told_with_the_runs_that_are_there(trainer: tuple[Command, str, str]) -> None:
    _, address, _ = trainer
    with running("train", "--run-id", "runB", "--initial-peers", address, *COMMON) as mistyped:
        line = wait_for_usage_error(mistyped, time.monotonic())
    assert "joined 1 peer; none of them is in run 'runB'; runs here: 'runA' (" in line
    assert "Check --run-id, or begin the run with --start-new" in line

    with running("doctor", "--run-id", "runB", "--initial-peers", address, "--listen", LOOPBACK) as doctor:
        assert doctor.wait() == 1
    assert re.search(r"FAIL  run +joined 1 peer; none of them is in run 'runB'; runs here: 'runA'", doctor.output)

    with running("train", "--run-id", "runB", "--initial-peers", address, "--start-new", *COMMON, *SMALL) as new:
        new.wait_for("Step 1")
        with running("join", address, *COMMON) as lost:
            line = wait_for_usage_error(lost, time.monotonic())
        assert re.search(r"2 runs are there: .*'run[AB]' \(1 peer\).*; choose one of them with --run-id", line)


@pytest.mark.long
def test_a_ticket_that_cannot_be_used_is_refused_with_the_reason(trainer: tuple[Command, str, str]) -> None:
    _, address, ticket = trainer
    place = Address.parse(address)
    for bad, message in [
        (ticket[:-7], "is cut off or mistyped; copy it whole"),
        ("mh2" + ticket[3:], "is of version 2, and this manyhands reads version 1"),
        (str(Ticket("gone", [place])), "none of them is in run 'gone'"),
        (str(Ticket("runA", [place], b"x" * 16)), "run 'runA' has other settings now than when the ticket was made"),
        (str(Ticket("runA", [Address.parse("127.0.0.1:1")])), "connection refused"),
    ]:
        with running("join", bad, *COMMON) as newcomer:
            line = wait_for_usage_error(newcomer, time.monotonic())
        assert message in line, newcomer.output
