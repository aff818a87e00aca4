"""A run by invitation from the command line: its owner, a coordinator, and trainers with and without a ticket."""

from __future__ import annotations

from pathlib import Path

import pytest

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
def test_a_run_by_invitation(tmp_path: Path) -> None:
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
            peer_id = one.wait_for("Joining run ours as peer").split()[-1]
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
            used_up = ended(tmp_path, "join", invitation, *COMMON, code=2)
            assert "the invitation is used up, it was for 2" in used_up
        by_owner = ["--key", "ours.key", "--charter", "ours.charter", "--initial-peers", address]
        assert "is banned from run ours" in ended(tmp_path, "ban", peer_id, *by_owner)
        first.wait_for(f"Peer {peer_id} is banned")
        assert f"{peer_id}  banned" in ended(tmp_path, "members", *by_owner)
