from manyhands.monitor.web.address import bind
from manyhands.monitor.web.live import LiveSource
from manyhands.monitor.web.server import PageServer
from manyhands.monitor.web.source import Fill, Filled, Source

__all__ = ["Fill", "Filled", "LiveSource", "PageServer", "Source", "bind"]
