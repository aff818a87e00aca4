"""Predicts how a run trains before it begins: step times, bytes, and which kind of steps to choose. Without torch."""

from manyhands.planning.choice import Choice, Plan, plan_of
from manyhands.planning.measured import Constants, measured_constants
from manyhands.planning.model import Run, Step

__all__ = ["Choice", "Constants", "Plan", "Run", "Step", "measured_constants", "plan_of"]
