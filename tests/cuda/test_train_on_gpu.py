"""`manyhands train` on a GPU, beside peers without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.process.commands import LOOPBACK, running


@pytest.mark.process
@pytest.mark.parametrize("precision", ["auto", "float16", "float32"])
def test_a_gpu_and_a_cpu_train_one_model(precision: str, tmp_path: Path) -> None:
    stop_file = tmp_path / "stop"
    train = (
        "train", "--run-id", "gpu", "--listen", LOOPBACK, "--stop-file", str(stop_file), "--target-batch-size", "512",
        "--batch-size", "16", "--hidden-size", "64", "--intermediate-size", "128", "--embedding-size", "32",
    )  # fmt: skip
    with running(*train, "--precision", precision, "--slow-down", "2") as first:
        (address,) = re.findall(r"--initial-peers (\S+)", first.wait_for("Others can join"))
        first.wait_for("Computing on cuda")
        with running(*train, "--initial-peers", address, "--device", "cpu", "--threads", "2") as second:
            second.wait_for("Computing on cpu in float32")
            for _ in range(2):
                second.wait_for("Averaged tensors successfully with 2 peers")
            (step,) = re.findall(r"Step (\d+)$", second.wait_for("[INFO] Step ").strip())
            stop_file.write_text(str(int(step) + 3))
            assert first.wait() == 0, first.output
            assert second.wait() == 0, second.output
    losses = [float(re.findall(r"Held-out loss (\d+\.\d+)", output)[0]) for output in (first.output, second.output)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
