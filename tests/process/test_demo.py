"""The main job, small: one command trains one ALBERT on several processes, through a death and a birth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.commands import running
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process


@pytest.mark.long
def test_the_demo_trains_averages_and_draws_its_curves(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    arguments = ("--peers", "3", "--steps", "4", "--target-batch-size", "64", "--summary", str(path))
    with running("demo", *arguments, folder=tmp_path) as demo:
        code = demo.wait(2 * PATIENCE_S)  # many processes load torch, and train one after the other
        assert code == 0, demo.output
    assert "The curves are in demo.png." in demo.output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads(path.read_text())
    assert summary["steps"] >= 4
    assert summary["peers_seen"] == 4
    assert summary["heldout_loss_last"] < summary["heldout_loss_first"]
    assert summary["joined_late_samples"] > 0
    assert len(summary["state_digest_per_peer"]) == 3
    assert len(set(summary["state_digest_per_peer"].values())) == 1
    assert summary["samples_used"] <= summary["samples_computed"] == sum(summary["samples_per_peer"].values())
    assert summary["rounds_committed"] >= 3
    assert summary["problems"] == []
    assert all(count > 0 for count in summary["bytes_sent_per_peer"].values())
    for line in ("Collaboration accumulated", "Averaged tensors successfully with 3 peers", "Optimizer step: done!"):
        assert line in demo.output


@pytest.mark.long
@pytest.mark.parametrize("lie", ["sign-flip", "mean-flip"])
def test_the_demo_with_a_liar_says_what_became_of_it(lie: str, tmp_path: Path) -> None:
    """Of a reducer that lies all others complain, and it is a member no more; of a gradient nobody can tell."""
    path = tmp_path / "summary.json"
    arguments = ("--liar", lie, "--steps", "7", "--target-batch-size", "64", "--summary", str(path))
    with running("demo", *arguments, folder=tmp_path) as demo:
        code = demo.wait(2 * PATIENCE_S)
        assert code == 0, demo.output
    summary = json.loads(path.read_text())
    assert summary["problems"] == []
    assert len(summary["state_digest_per_peer"]) == 2
    assert len(set(summary["state_digest_per_peer"].values())) == 1
    liar = summary["liar"]
    standings = list(liar["standings"].values())
    named = f"the means of peer {liar['peer_id']} are not the means of the members' values"
    if lie == "mean-flip":
        assert {"trainer 1", "trainer 2"} <= {name for names in liar["noticed"].values() for name in names}
        assert "guest" in standings[standings.index("member") :]
        assert named in demo.output
    else:
        assert (liar["noticed"], standings[-1]) == ({}, "member")
        assert named not in demo.output
        assert "nobody: a gradient of the usual size" in demo.output
