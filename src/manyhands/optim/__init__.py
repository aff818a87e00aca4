from manyhands.optim.config import ProgressConfig

__all__ = ["ProgressConfig"]
