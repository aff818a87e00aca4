from manyhands.reach.messages import DIAL_BACK, EXAMINE
from manyhands.reach.service import Reach

__all__ = ["DIAL_BACK", "EXAMINE", "Reach"]
