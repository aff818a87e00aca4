"""Estimates the memory that a model needs, before anything is started. Imports no torch."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from pathlib import Path

import psutil

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.config import AlbertRecipe

BYTES_PER_PARAMETER = 28
"""The parameter, its gradient, LAMB's two moments, accumulated and averaged gradient, and data from other peers."""

LIBRARY_BYTES = 500e6
"""Memory of this process after torch and transformers are imported."""

THREAD_BYTES = 72e6
"""Address space that the C library reserves for a thread: its stack, and room for its data."""

_CGROUP = Path("/sys/fs/cgroup")


def num_parameters(recipe: AlbertRecipe, vocab_size: int) -> int:
    """Number of parameters of the model."""
    embedding = recipe.embedding_size
    hidden = recipe.hidden_size
    inner = recipe.intermediate_size
    embeddings = (vocab_size + recipe.seq_length + 2 + 2) * embedding  # words, positions, segments, LayerNorm
    layer = 4 * (hidden + 1) * hidden + (hidden + 1) * inner + (inner + 1) * hidden + 4 * hidden  # shared by all
    heads = (hidden + 1) * hidden + 2 * (hidden + 1) + vocab_size + (hidden + 3) * embedding
    return embeddings + (embedding + 1) * hidden + layer + heads


def needed_bytes(recipe: AlbertRecipe, vocab_size: int) -> int:
    """Approximate memory for training with one sample at a time, in bytes."""
    tokens = recipe.seq_length
    hidden = recipe.hidden_size
    num_masked = int(tokens * recipe.mask_probability) + 1  # scores are computed for masked tokens only
    in_a_layer = tokens * (10 * hidden + 4 * recipe.intermediate_size + 3 * recipe.num_attention_heads * tokens)
    activations = 4 * (recipe.num_hidden_layers * in_a_layer + 3 * num_masked * vocab_size)
    return int(LIBRARY_BYTES) + BYTES_PER_PARAMETER * num_parameters(recipe, vocab_size) + activations


def available_bytes() -> int:
    """Memory that this process may still take, in bytes, limited by the machine and its container."""
    available: int = psutil.virtual_memory().available
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        fields = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except OSError:  # no container, or not Linux
        return available
    if limit == "max":
        return available
    used_bytes = int(used) - int(fields.get("inactive_file", 0))  # minus the file cache
    return min(available, max(int(limit) - used_bytes, 0))


def check_address_space(num_bytes: float = 0.0) -> None:
    """Check that a limit of the shell leaves enough address space: without enough, torch may abort the process.

    Args:
        num_bytes: needed in addition to the libraries.
    Raises:
        ConfigError: it does not.
    """
    limit = _address_limit()
    here = psutil.Process().memory_info().vms + (os.cpu_count() or 1) * THREAD_BYTES
    needed = here + _torch_bytes() + LIBRARY_BYTES + num_bytes
    if needed > limit:
        raise ConfigError(
            f"PyTorch and the model need about {needed / 1e9:.1f} GB of address space, and a limit of the shell leaves "
            f"{limit / 1e9:.1f} GB; raise it before the start: ulimit -v unlimited"
        )


def _address_limit() -> float:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return math.inf
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _torch_bytes() -> int:
    """Size of torch's own libraries, which are mapped whole; 0 if they are loaded, or not installed."""
    found = importlib.util.find_spec("torch")
    if "torch" in sys.modules or found is None or found.origin is None:
        return 0
    return sum(path.stat().st_size for path in (Path(found.origin).parent / "lib").glob("*.so*"))


def check_memory(run_id: str, recipe: AlbertRecipe, vocab_size: int) -> None:
    """Check that the model fits into this machine.

    Raises:
        ConfigError: it does not. The message names the needed and the free memory.
    """
    needed = needed_bytes(recipe, vocab_size)
    loaded = min(psutil.Process().memory_info().rss, LIBRARY_BYTES)  # the import may have begun
    available = available_bytes() + loaded
    check_address_space(needed - LIBRARY_BYTES)
    if needed > available:
        raise ConfigError(
            f"too little memory for the model of run {run_id!r}: its {num_parameters(recipe, vocab_size) / 1e6:.1f} "
            f"million parameters need about {needed / 1e9:.1f} GB, and this machine has {available / 1e9:.1f} GB free; "
            "end other programs, or use a machine with more memory"
        )
