"""The benchmarks of how groups form run; those that count in rounds have the figures that the docs state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.test_benchmarks import results_of

pytestmark = pytest.mark.process


@pytest.mark.long
def test_the_benchmark_of_matchmaking_reports_its_figures(tmp_path: Path) -> None:
    results, _ = results_of("matchmaking.py", tmp_path, "--peers", "2,3", "--groups", "2")
    assert [(result["peers"], result["case"]) for result in results] == [
        (peers, case) for peers in (2, 3) for case in ("cold", "warm", "dht")
    ]
    assert all(0 <= result["p50_ms"] <= result["p99_ms"] for result in results)


@pytest.mark.sweep
def test_mixing_has_the_figures_of_the_paper(tmp_path: Path) -> None:
    """Rounds to a variance of 1e-9, from the experiment of Ryabinin et al., which draws its chance otherwise."""
    results, _ = results_of("mixing_sim.py", tmp_path)
    rounds = {
        (result["peers"], result["grid"], result["p_fail"], result["method"]): result["rounds_1e-9"]
        for result in results
    }
    assert rounds[1024, "32x32", 0.0, "grid"] == 2.0
    assert rounds[512, "8x8x8", 0.0, "grid"] == 3.0
    assert rounds[1024, "32x32", 0.01, "fixed_grid"] == pytest.approx(5.8, abs=0.6)
    assert rounds[1024, "32x32", 0.01, "grid"] == pytest.approx(5.8, abs=0.4)
    assert rounds[900, "32x32", 0.01, "fixed_grid"] == pytest.approx(6.5, abs=0.4)
    assert rounds[900, "32x32", 0.01, "grid"] <= 6.5
    for peers, grid in ((1024, "32x32"), (900, "32x32")):
        assert 6.0 <= rounds[peers, grid, 0.01, "random"] <= 7.2
    assert all(set(result) == {"peers", "grid", "p_fail", "method", "rounds_1e-9", "rounds_1e-4"} for result in results)
    assert rounds[512, "32x32", 0.0, "chosen"] < rounds[512, "32x32", 0.0, "grid"], "half of the grid is empty"


@pytest.mark.sweep
def test_the_benchmark_of_a_small_grid_ends_with_a_small_spread(tmp_path: Path) -> None:
    arguments = ["--peers", "9", "--max-group-size", "3", "--steps", "4", "--p-fail", "0"]
    ((result,), _) = results_of("grid_swarm.py", tmp_path, *arguments)
    assert result["spread_last_10_max"] < 0.5
    assert result["largest_group"] == 3


@pytest.mark.long
def test_the_benchmark_of_training_in_a_grid_makes_all_steps(tmp_path: Path) -> None:
    arguments = ["--peers", "9", "--max-group-size", "3", "--steps", "8", "--p-fail", "0"]
    ((result,), _) = results_of("optimizer_grid.py", tmp_path, *arguments)
    assert result["steps"] >= 6
    assert list(result["grids"]) == ["3x3"]
    assert (result["steps_made_of_due"], result["reloads"], result["short"]) == (1.0, 0, {})
    assert result["disagreement_max"] < 1e-5
    assert 0 <= result["matchmaking_p50_s"] <= result["wait_p50_s"]
