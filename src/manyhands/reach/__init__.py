from manyhands.reach.messages import DIAL_BACK, EXAMINE, REACHED
from manyhands.reach.own_mode import OwnMode
from manyhands.reach.service import Reach

__all__ = ["DIAL_BACK", "EXAMINE", "REACHED", "OwnMode", "Reach"]
