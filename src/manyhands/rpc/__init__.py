from manyhands.rpc.config import RpcConfig
from manyhands.rpc.endpoint import Endpoint
from manyhands.rpc.method import Method

__all__ = ["Endpoint", "Method", "RpcConfig"]
