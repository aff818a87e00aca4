"""What a learning rate schedule is made of, in words, so that peers with different ones do not train together. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from manyhands.optim.serializable import is_plain

_PROGRESS = {"last_epoch", "base_lrs"}  # what moves, or is in the hyper-parameters already


def describe(scheduler: Any) -> str:
    """A torch scheduler's class and constants, with those of the schedulers inside it; empty for None.

    Functions, as in ``LambdaLR``, have no constants: what they do cannot be compared.
    """
    if scheduler is None:
        return ""
    state = {name: _constant(value) for name, value in scheduler.state_dict().items()}
    constants = {name: state[name] for name in sorted(state) if not name.startswith("_") and name not in _PROGRESS}
    parts = [f"{name}={value}" for name, value in constants.items() if is_plain(value)]
    if "_milestones" in state:
        parts.append(f"milestones={state['_milestones']}")
    parts += [describe(inner) for inner in getattr(scheduler, "_schedulers", [])]
    return f"{type(scheduler).__name__}({', '.join(parts)})"


def _constant(value: Any) -> Any:
    return sorted(value.elements()) if isinstance(value, Counter) else value
