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
