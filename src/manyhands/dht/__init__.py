from manyhands.dht.config import DhtConfig
from manyhands.dht.node import DhtNode, StoredValue
from manyhands.dht.records import Reason
from manyhands.dht.routing import Contact

__all__ = ["Contact", "DhtConfig", "DhtNode", "Reason", "StoredValue"]
