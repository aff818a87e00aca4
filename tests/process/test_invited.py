"""A run by invitation from the command line: its owner, a coordinator, and trainers with and without a ticket."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from manyhands.access import SignedCharter
from manyhands.base.ticket import Ticket
from tests.process.commands import LOOPBACK, running

pytestmark = pytest.mark.process

COMMON = ("--listen", LOOPBACK, "--threads", "1", "--no-checkpoints")
SMALL = (
    "--hidden-size", "48", "--num-attention-heads", "3", "--intermediate-size", "64", "--num-hidden-layers", "1",
    "--seq-length", "32", "--vocab-size", "600", "--target-batch-size", "24", "--batch-size", "4",
)  # fmt: skip


def ended(folder: Path, *arguments: str, code: int = 0) -> str:
    """The output of a command that ends by itself."""
    with running(*arguments, folder=folder) as command:
        assert command.wait() == code, command.output
        return command.output


def ticket_in(output: str) -> str:
    return next(word for word in output.split() if word.startswith("mh1"))


def start_coordinator(folder: Path) -> str:
    """Its peer id: it is started once without a charter, as its owner needs the id for that."""
    with running("first-peer", "--listen", LOOPBACK, "--state-dir", "state", folder=folder) as first:
        return first.wait_for("Running a first peer as peer").split()[-1]


@pytest.mark.long
def test_a_run_by_invitation_admits_counts_and_bans_peers(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(f"Sentence number {n} of this text is here. It has another one behind it.\n\n" for n in range(3000))
    )
    coordinator = start_coordinator(tmp_path)
    output = ended(tmp_path, "run", "create", "--run-id", "ours", "--access", "invite", "--coordinator", coordinator)
    assert "manyhands first-peer --charter ours.charter --state-dir" in output
    assert (tmp_path / "ours.key").stat().st_mode & 0o777 == 0o600
    assert "is not overwritten" in ended(tmp_path, "run", "create", "--run-id", "ours", code=2)
    arguments = ["first-peer", "--charter", "ours.charter", "--listen", LOOPBACK, "--state-dir", "state"]
    with running(*arguments, folder=tmp_path) as first:
        first.wait_for("Only peers with a ticket can join")
        address = first.wait_for("--initial-peers").split()[-1]
        first.wait_for("manyhands invite")
        invitation = ticket_in(ended(tmp_path, "invite", "--state-dir", "state", "--uses", "2", "--expires", "1h"))
        refused = ended(tmp_path, "train", "--initial-peers", address, "--run-id", "ours", *COMMON, *SMALL, code=2)
        assert "run 'ours' is by invitation; ask its owner for a ticket" in refused
        refused = ended(tmp_path, "train", "--initial-peers", address, *COMMON, *SMALL, code=2)
        assert "run 'ours' is by invitation; ask its owner for a ticket" in refused
        with running("train", "--initial-peers", invitation, *COMMON, *SMALL, "--text", str(text)) as one:
            peer_id = one.wait_for("Beginning run ours as peer").split()[-1]
            one.wait_for("Others join this run with a ticket of its coordinator")
            one.wait_for("Your current contribution")
            with running("join", invitation, *COMMON, "--batch-size", "4", "--text", str(text)) as two:
                two.wait_for("Averaged tensors successfully with 2 peers")
            observing = ticket_in(ended(tmp_path, "invite", "--state-dir", "state", "--role", "observer"))
            evaluation = ["--max-evaluations", "1", "--threads", "1", "--text", str(text)]
            with running("evaluate", "--initial-peers", observing, *evaluation) as evaluator:
                evaluator.wait_for("Held-out loss")
            listed = ended(tmp_path, "members", "--state-dir", "state")
            assert f"{peer_id}  trainer, lease for 12.0 h more" in listed
            used_up = ended(tmp_path, "join", invitation, *COMMON, "--text", str(text), code=2)
            assert "the invitation was for 2 peers and is used up" in used_up
        by_owner = ["--key", "ours.key", "--charter", "ours.charter", "--initial-peers", address]
        said = ended(tmp_path, "ban", peer_id, *by_owner)
        assert "is banned from run ours" in said
        assert "1 other peer came by it, too" in said
        first.wait_for(f"Peer {peer_id} is banned")
        assert f"{peer_id}  banned" in ended(tmp_path, "members", *by_owner)


@pytest.mark.long
@pytest.mark.timeout(400)  # several programs import torch, one after the other
def test_a_run_whose_owner_signed_the_settings_refuses_trainers_with_others(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Sentence number {n} of this text is here. It has another one.\n\n" for n in range(3000)))
    training = (*COMMON, *SMALL, "--text", str(text))
    coordinator = start_coordinator(tmp_path)
    with running("train", "--run-id", "ours", *training) as trial:
        address = trial.wait_for("--initial-peers").split()[-1]
        trial.wait_for("Others can join this run with one word")
        limits = ["--max-weight-ratio", "20"]
        settings = ["--coordinator", coordinator, "--access", "open", "--manifest-of", address]
        assert "with fingerprint" in ended(tmp_path, "run", "create", "--run-id", "ours", *settings, *limits)
    arguments = ["first-peer", "--charter", "ours.charter", "--listen", LOOPBACK, "--state-dir", "state"]
    with running(*arguments, folder=tmp_path) as first:
        place = first.wait_for("--initial-peers").split()[-1]
        other = ("--learning-rate", "0.5")
        refused = ended(tmp_path, "train", "--initial-peers", place, *training, *other, code=2)
        assert "does not fit run 'ours': its owner signed other settings (fingerprint" in refused.splitlines()[-1]
        with running("train", "--initial-peers", place, *training) as one:
            one.wait_for("Your current contribution")
            refused = ended(tmp_path, "train", "--initial-peers", place, *training, *other, code=2)
            assert "learning_rate" in refused.splitlines()[-1]
            with running("monitor", "--initial-peers", place, "--listen", LOOPBACK) as monitor:
                ticket = Ticket.parse(monitor.wait_for("manyhands join mh1").split()[-1])
                assert ticket.charter == SignedCharter.load(tmp_path / "ours.charter").digest


@pytest.mark.long
def test_a_coordinator_with_a_copied_state_dir_stops_coordinating(tmp_path: Path) -> None:
    coordinator = start_coordinator(tmp_path)
    ended(tmp_path, "run", "create", "--run-id", "ours", "--coordinator", coordinator)
    with running("first-peer", "--listen", LOOPBACK) as third:
        place = third.wait_for("--initial-peers").split()[-1]
        arguments = ("first-peer", "--charter", "ours.charter", "--listen", LOOPBACK, "--initial-peers", place)
        shutil.copytree(tmp_path / "state", tmp_path / "copy")
        with running(*arguments, "--state-dir", "state", folder=tmp_path) as older:
            older.wait_for("manyhands invite")
            with running(*arguments, "--state-dir", "copy", folder=tmp_path) as younger:
                older.wait_for("It began later")
                younger.wait_for("so this process gives no leases and publishes no bans any more")
            assert ended(tmp_path, "invite", "--state-dir", "state")
