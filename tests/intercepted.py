"""An endpoint whose answers a test may change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from manyhands.base.identity import PeerId
from manyhands.rpc import Endpoint, Method
from manyhands.rpc.serving import Guard

Handler = Callable[[PeerId, Any], Awaitable[Any] | Any]


class InterceptedEndpoint(Endpoint):
    """An endpoint that remembers what serves each method, so that a test can put something in front of it.

    Attributes:
        handlers: by the name of a method, the handler that the peer itself registered.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.handlers: dict[str, Handler] = {}
        super().__init__(*args, **options)

    def handle(self, method: Method[Any, Any], handler: Handler, guard: Guard | None = None) -> None:
        self.handlers[method.name] = handler
        super().handle(method, handler, guard)

    def answer_with(self, method: Method[Any, Any], handler: Handler) -> None:
        """Serve a method with another handler than the peer's own."""
        self.unhandle(method)
        super().handle(method, handler)

    def answer_again(self, method: Method[Any, Any]) -> None:
        """Serve a method as the peer itself does."""
        self.answer_with(method, self.handlers[method.name])
