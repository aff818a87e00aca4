from manyhands.monitor.monitor import RunMonitor

__all__ = ["RunMonitor"]
