from manyhands.runtime.loop import LoopThread
from manyhands.runtime.tasks import TaskOwner
from manyhands.runtime.threads import BlockingThreads

__all__ = ["BlockingThreads", "LoopThread", "TaskOwner"]
