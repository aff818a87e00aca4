from manyhands.dht.config import DhtConfig
from manyhands.dht.known_peers import KnownPeers
from manyhands.dht.node import DhtNode
from manyhands.dht.read_result import Part, StoredValue
from manyhands.dht.records import Reason
from manyhands.dht.routing import Contact
from manyhands.dht.schema import Schema
from manyhands.dht.writer import Entry

__all__ = ["Contact", "DhtConfig", "DhtNode", "Entry", "KnownPeers", "Part", "Reason", "Schema", "StoredValue"]
