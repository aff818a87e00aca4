"""The programs in benchmarks/ run and leave nothing behind; their figures are not judged here."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from manyhands.planning.measured import PATH, Measured
from tests.process.commands import Command
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
IS_LINUX = sys.platform == "linux"
USAGE = 2
INTERRUPTED = 130


def results_of(script: str, folder: Path, *arguments: str) -> tuple[Any, str]:
    """What the script wrote as JSON, and what it printed."""
    path = folder / "results.json"
    command = Command([str(BENCHMARKS / script), *arguments, "--json", str(path)], module=None)
    try:
        assert command.wait() == 0, command.output
    finally:
        command.close()
    return json.loads(path.read_text()), command.output


@pytest.mark.long
def test_the_benchmark_of_state_downloads_reports_its_figures(tmp_path: Path) -> None:
    arguments = ["--mb", "12", "--donors", "2", "--rounds", "1"]
    (result,), _ = results_of("state.py", tmp_path, *arguments)
    assert (result["system"], result["mb"], result["donors"]) == ("manyhands", 12, 2)
    assert result["mb_per_s"] > 0
    assert result["killed_donor_extra_s"] < 15
    assert result["frozen_donor_extra_s"] < 15


@pytest.mark.long
def test_a_stack_of_models_trains_as_peers_one_by_one() -> None:
    command = Command([str(BENCHMARKS / "local_steps_gpu.py"), "--check"], module=None)
    try:
        assert command.wait() == 0, command.output
    finally:
        command.close()
    assert float(command.output.rpartition(": ")[2]) < 2e-4, "a tenth of one step of AdamW, which grows what rounds"


@pytest.mark.sweep
def test_the_benchmark_of_overlap_reports_its_figures(tmp_path: Path) -> None:
    few = ["--mb", "1", "--codec", "none", "--pauses", "0.1", "--seconds", "0.05", "--repeats", "1"]
    results, _ = results_of("overlap.py", tmp_path, *few)
    assert [(result["loop"], result["pause_s"]) for result in results] == [
        ("large", None),
        ("large", 0.1),
        ("tiny", None),
        ("tiny", 0.1),
    ]
    for result in results:
        assert result["steps_per_s"] > 0
        assert result["speed_kept"] > 0


@pytest.mark.sweep
def test_the_benchmark_of_codecs_reports_their_bits_speed_and_error(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    arguments = ["--numel", "300000", "--repeats", "1", "--json", str(path)]
    command = Command([str(BENCHMARKS / "codec_speed.py"), *arguments], module=None)
    try:
        assert command.wait() == 0, command.output
    finally:
        command.close()
    results = json.loads(path.read_text())
    assert [result["codec"] for result in results] == ["memcpy", "none", "fp16", "bf16", "int8", "int4"]
    bits = [result["bits_per_value"] for result in results]
    assert bits == sorted(bits, reverse=True)
    for result in results:
        assert result["encode_gb_per_s"] > 0
        assert result["decode_gb_per_s"] > 0
    assert [result["mean_squared_error"] == 0 for result in results] == [True, True, False, False, False, False]


@pytest.mark.long
def test_the_check_of_the_plan_reports_predicted_and_measured_seconds(tmp_path: Path) -> None:
    (result,), _ = results_of("plan_check.py", tmp_path, "--set-ups", "loopback", "--steps", "1")
    assert (result["set_up"], result["codec"], result["measured_samples"]) == ("loopback", "none", 160)
    assert result["predicted_s"] > 0
    assert result["measured_s"] > 0


@pytest.mark.long
def test_the_constants_of_the_plan_are_printed_with_their_units() -> None:
    command = Command([str(BENCHMARKS / "plan_constants.py"), "--only", "codecs"], module=None)
    try:
        assert command.wait() == 0, command.output
    finally:
        command.close()
    printed = [json.loads(line) for line in command.output.splitlines() if line.startswith("{")]
    recorded = {
        constant.name: constant.value for constant in msgspec.json.decode(PATH.read_bytes(), type=list[Measured])
    }
    assert len(printed) == 6
    for constant in printed:
        assert constant["unit"] == "bits"
        assert recorded[constant["name"]] == pytest.approx(constant["value"], rel=1e-3)


@pytest.mark.sweep
def test_the_benchmark_of_rounding_drift_reports_its_figures(tmp_path: Path) -> None:
    arguments = ["--steps", "10", "--optimizers", "adamw", "--dtypes", "float32"]
    results, _ = results_of("rounding_drift.py", tmp_path, *arguments)
    assert [result["how"] for result in results] == ["foreach", "fused", "in double", "one ulp"]
    assert 0 < results[2]["apart"]["10"] < results[3]["apart"]["10"] < 1e-6


@pytest.mark.sweep
def test_the_benchmark_of_a_coordinator_reports_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    arguments = ["--peers", "3", "--processes", "2", "--settle", "0.1", "--seconds", "0.5", "--json", str(path)]
    command = Command([str(BENCHMARKS / "coordinator.py"), *arguments], module=None)
    try:
        assert command.wait() == 0, command.output
    finally:
        command.close()
    (result,) = json.loads(path.read_text())
    assert (result["peers"], result["peers_per_process"]) == (3, 2)
    assert result["rss_mb"] > 0
    assert {"seconds", "cpu_percent", "cpu_ms_per_s_of_peer", "known_peers", "connected_peers"} <= result.keys()


@pytest.mark.sweep
@pytest.mark.skipif(not IS_LINUX, reason="the memory of a process is read from /proc")
def test_the_benchmark_of_a_relay_reports_its_figures(tmp_path: Path) -> None:
    results, _ = results_of("relay.py", tmp_path, "--mb", "10", "--turns", "1", "--connections", "20")
    bulk, control = results
    for name in ("direct_mb_per_s", "relayed_mb_per_s", "relayed_to_direct", "direct_cpu_s_per_gb"):
        assert bulk[name] > 0, name
    assert bulk["relay_cpu_s_per_gb"] >= 0
    assert control["connections"] == 20
    assert control["idle_mb"] > 0


@pytest.mark.sweep
def test_the_benchmark_of_the_dht_reports_its_figures(tmp_path: Path) -> None:
    [result], _ = results_of(
        "dht.py", tmp_path, "--systems", "manyhands", "--peers", "3", "--ops", "4", "--warm-up", "1"
    )
    assert (result["system"], result["peers"], result["nodes_per_process"], result["failures"]) == (
        "manyhands",
        3,
        1,
        0,
    )
    for name in ("store_p50_ms", "store_p99_ms", "get_p50_ms", "get_p99_ms", "cpu_ms_per_op", "rss_mb_per_node"):
        assert result[name] >= 0, name


@pytest.mark.long
def test_the_benchmark_of_the_simulated_dht_reports_its_figures(tmp_path: Path) -> None:
    [result], _ = results_of("dht_sim.py", tmp_path, "--nodes", "24", "--minutes", "1")
    assert result["nodes"] == 24
    assert result["gets"] > 100
    assert result["gets_good"] == 1
    assert result["churn_calls_per_node_and_min"] > result["rest_calls_per_node_and_min"] > 0


@pytest.mark.long
def test_the_benchmark_of_progress_reports_its_figures(tmp_path: Path) -> None:
    arguments = ["--peers", "160", "--churn", "0.1", "--steps", "2", "--step-s", "40"]  # batches take up to 6 s
    before, now = results_of("progress_sim.py", tmp_path, *arguments)[0]
    assert (before["reads"], now["reads"]) == ("all", "part")
    assert before["peers"] == now["peers"] == 160
    assert before["samples_error"] < 0.2
    assert now["samples_error"] < 0.2
    assert 0 < now["eta_error"] < 0.2
    assert 0 < now["member_reads_bytes_per_s"] < before["member_reads_bytes_per_s"] / 2


@pytest.mark.sweep
def test_the_benchmark_of_all_reduce_reports_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    arguments = ["--peers", "2", "--mb", "1", "--rounds", "2", "--systems", "manyhands", "--codec", "none"]
    command = Command([str(BENCHMARKS / "allreduce.py"), *arguments, "--json", str(path)], module=None)
    try:
        assert command.wait() == 0, command.output
    finally:
        command.close()
    (result,) = json.loads(path.read_text())
    assert [result.pop(name) for name in ("system", "peers", "mb", "codec")] == ["manyhands", 2, 1.0, "none"]
    assert result.pop("peak_extra_mb") is None or psutil.LINUX
    assert result.keys() == {"mb_per_s", "seconds", "formation_s", "cpu_s_per_gb"}
    assert result.pop("cpu_s_per_gb") >= 0, "so little may be less than what the system counts in"
    assert all(value > 0 for value in result.values()), result


@pytest.mark.sweep
def test_the_benchmark_of_data_reports_its_figures(tmp_path: Path) -> None:
    result, _ = results_of("data.py", tmp_path, "--mb", "0.3", "--gb", "0.02", "--num-proc", "1", "--seconds", "0.01")
    known = {"prepare_mb_per_s", "first_sample_s", "loader_samples_per_s", "step_samples_per_s", "loader_x_step"}
    known |= {"first_served_sample_s", "stream_mb_per_s"}
    assert result.keys() == known | {"text_mb", "samples_gb", "prepare_peak_mb", "resident_mb_per_gb"}
    assert all(result[name] > 0 for name in known), result
    if IS_LINUX:
        assert result["resident_mb_per_gb"] < 100


def called(script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[object, str]:
    """The exit code of a script that refuses its arguments, and what it printed; it runs in this process."""
    errors = io.StringIO()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with redirect_stdout(errors), redirect_stderr(errors), pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    return exit_.value.code, errors.getvalue()


def test_bad_arguments_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = called("allreduce.py", ["--systems", "manyhands,smoke-signals"], monkeypatch)
    assert code == USAGE
    assert "no system 'smoke-signals'" in output
    assert len(output.splitlines()) == 1, output


@pytest.mark.skipif(not IS_LINUX, reason="the benchmark counts memory and processes with /proc")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--systems", "hivemind"], "hivemind is not installed"),
        (["--target", "4"], "a target is at least one batch"),
        (["--peers", "2"], "at least 3"),
        (["--link", "lan"], "'lan'"),
    ],
)
def test_bad_arguments_of_the_benchmark_of_a_collaboration_are_one_line(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "hivemind" in arguments and importlib.util.find_spec("hivemind") is not None:
        pytest.skip("hivemind is installed")
    code, output = called("collaboration.py", arguments, monkeypatch)
    assert code == USAGE
    assert words in output
    assert len(output.splitlines()) == 1, output


@pytest.mark.sweep
def test_the_benchmark_of_a_collaboration_reports_its_figures(tmp_path: Path) -> None:
    arguments = ["--systems", "manyhands", "--modes", "sync", "--target", "64", "--quick"]
    ((result,), _) = results_of("collaboration.py", tmp_path, *arguments)
    assert "reasons" not in result
    assert (result["system"], result["mode"], result["target"], result["peers"]) == ("manyhands", "sync", 64, 4)
    assert 0 < result["share_of_ideal"] <= 1
    assert result["samples_over_target"] >= 1
    assert result["newcomer_first_contribution_s"] > 0
    assert result["left_after_exit"] == 0
    assert set(result["heldout_loss_at_samples"]) >= {"1024"}


@pytest.mark.long
def test_an_interrupted_benchmark_leaves_no_process_behind() -> None:
    arguments = ["--systems", "manyhands", "--peers", "2", "--mb", "1", "--codec", "none", "--rounds", "10000"]
    command = Command([str(BENCHMARKS / "allreduce.py"), *arguments], module=None)
    try:
        command.wait_for("none: round 3 of")
        started = command.descendants()
        command.interrupt()
        assert command.wait() == INTERRUPTED
        assert started
        assert not psutil.wait_procs(started, timeout=PATIENCE_S)[1], "processes are left"
        assert command.output.splitlines()[-1] == "stopped"
    finally:
        command.close()


IS_LINUX = sys.platform == "linux"


@pytest.mark.sweep
@pytest.mark.parametrize(("case", "figure"), [("idle", "idle_overhead"), ("sync", "peak_extra_x_params")])
def test_the_benchmark_of_optimizer_overhead_reports_its_figures(tmp_path: Path, case: str, figure: str) -> None:
    few = ["--batches", "1", "--memory-mb", "1", "--cases", case]
    result, output = results_of("optimizer_overhead.py", tmp_path, *few)
    if case == "idle" or IS_LINUX:
        assert figure in output
        more = {"plain_step_s", f"{figure}_less_core_wait"} if IS_LINUX else {"plain_step_s"}
        assert result.keys() == {figure} | (more if case == "idle" else set())


@pytest.mark.sweep
def test_the_gpu_benchmark_reports_its_figures_or_that_it_was_skipped(tmp_path: Path) -> None:
    few = ["--batch-sizes", "2", "--batches", "1", "--mb", "1"]
    results, output = results_of("gpu.py", tmp_path, *few)
    if not results:
        assert output.strip() == "skipped: torch finds no NVIDIA GPU here"
        return
    local, copies = results
    assert local.keys() == {"batch_size", "plain_ms", "added_ms"}
    assert copies.keys() == {"mb", "read_ms", "write_ms", "advance_ms", "peak_extra_x_params"}


@pytest.mark.long
def test_the_trace_of_a_step_reports_its_figures(tmp_path: Path) -> None:
    figures, output = results_of("step_trace.py", tmp_path)
    both = figures.pop("from_step_to_step")
    assert figures.keys() == {"files", "functions", "classes", "tasks", "frames_average_to_exchange"}
    assert "butterfly.py:run" in output
    assert both["functions"] > both["files"] > 0
    assert both.keys() == {"files", "functions", "classes"}
    assert figures["functions"] > figures["files"] > figures["frames_average_to_exchange"] > 0


AS_USER = """
import os, runpy, sys
os.geteuid = lambda: 1000
sys.path.insert(0, os.path.dirname(sys.argv[1]))
script = sys.argv.pop(1)
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.long
def test_without_root_the_benchmark_of_reach_ends_with_one_line() -> None:
    command = Command(["-c", AS_USER, str(BENCHMARKS / "reach.py"), "--pairs"], module=None)
    try:
        assert command.wait() == USAGE, command.output
    finally:
        command.close()
    (line,) = command.output.splitlines()
    assert line.startswith("skipped: an emulated network needs ")


@pytest.mark.sweep
@pytest.mark.skipif(not IS_LINUX or os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="no namespaces here")
def test_the_benchmark_of_reach_joins_and_contributes_behind_a_symmetric_router(tmp_path: Path) -> None:
    (row,), _ = results_of("reach.py", tmp_path, "--setups", "symmetric router", "--watch-s", "20")
    assert row["joins"]
    assert row["contributes"]
    assert row["mode"] == "client"
    assert row["advice"].startswith("No other peer can dial this one")


@pytest.mark.sweep
@pytest.mark.skipif(not IS_LINUX or os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="no namespaces here")
def test_two_peers_with_ipv6_are_connected_through_their_firewalls(tmp_path: Path) -> None:
    (row,), _ = results_of("reach.py", tmp_path, "--pairs", "--kinds", "IPv6 with a firewall")
    assert row["way"] == "punched"
    assert row["first_contribution_s"] is not None
