"""These tests need an NVIDIA GPU; `make test-cuda` says so where there is none, `make test` skips them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On the host: tests that run at the same time would only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
