"""accelerate keeps its state for the whole process."""

from __future__ import annotations

from accelerate.state import AcceleratorState, GradientState


def forget_accelerator() -> None:
    """Have the next ``Accelerator`` begin as in a new process."""
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
