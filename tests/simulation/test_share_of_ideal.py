"""How much of the computing of unlike peers ends up in steps: the scenario of benchmarks/collaboration.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from step_samples import bound, share_of_ideal

LATENCY_S = 0.0005


@pytest.mark.parametrize("target", [256, 64])
def test_synchronous_steps_use_almost_all_that_exact_steps_can(target: int) -> None:
    share, size = share_of_ideal(target, LATENCY_S)
    assert share >= 0.97 * bound(target)
    assert size <= 1.08


@pytest.mark.parametrize("target", [256, 64])
def test_delayed_steps_use_almost_all_that_peers_can_compute(target: int) -> None:
    share, size = share_of_ideal(target, LATENCY_S, delay="gradients")
    assert share >= 0.98
    assert size <= 1.1
