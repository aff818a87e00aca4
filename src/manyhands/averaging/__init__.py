from manyhands.averaging.config import AveragingConfig

__all__ = ["AveragingConfig"]
