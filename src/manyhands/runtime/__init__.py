from manyhands.runtime.loop import LoopThread
from manyhands.runtime.tasks import TaskOwner

__all__ = ["LoopThread", "TaskOwner"]
