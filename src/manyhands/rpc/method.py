"""Typed calls: a name, a request type and a response type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from manyhands.base.structs import make_ready

Request = TypeVar("Request", bound=msgspec.Struct)
Response = TypeVar("Response", bound=msgspec.Struct)


@dataclass(frozen=True)
class Method(Generic[Request, Response]):
    """A unary call between peers.

    Attributes:
        name: ``part.verb``, unique on the wire.
        request: msgspec struct that the caller sends; the receiver ignores unknown fields.
        response: msgspec struct that the caller receives.
    """

    name: str
    request: type[Request]
    response: type[Response]

    def __post_init__(self) -> None:
        make_ready(self.request, self.response)


@dataclass(frozen=True)
class StreamMethod(Generic[Request, Response]):
    """A streaming call, which is answered by any number of items.

    Attributes:
        name, request: as in a :class:`Method`.
        item: msgspec struct of each item.
    """

    name: str
    request: type[Request]
    item: type[Response]

    def __post_init__(self) -> None:
        make_ready(self.request, self.item)
