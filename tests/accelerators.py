"""accelerate keeps its state for the whole process."""

from __future__ import annotations

from accelerate.state import AcceleratorState, GradientState


def forget_accelerator() -> None:
    """Have the next ``Accelerator`` begin as in a new process."""
    GradientState._reset_state()  # noqa: SLF001 (accelerate has no public name for it)
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
