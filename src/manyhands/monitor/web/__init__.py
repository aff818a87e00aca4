from manyhands.monitor.web.address import bind
from manyhands.monitor.web.live import MonitorSource
from manyhands.monitor.web.source import Fill, Filled, Guess, Source

__all__ = ["Fill", "Filled", "Guess", "MonitorSource", "Source", "bind"]
