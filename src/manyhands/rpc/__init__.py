from manyhands.rpc.address_book import AddressSource
from manyhands.rpc.config import RpcConfig
from manyhands.rpc.endpoint import Endpoint
from manyhands.rpc.method import Method

__all__ = ["AddressSource", "Endpoint", "Method", "RpcConfig"]
