"""Typed calls: a name, a request type and a response type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from manyhands.base.structs import make_ready

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
ResponseT = TypeVar("ResponseT", bound=msgspec.Struct)


@dataclass(frozen=True)
class Method(Generic[RequestT, ResponseT]):
    """A call between peers.

    Attributes:
        name: ``part.verb``, unique on the wire.
        request: msgspec struct that the caller sends; the receiver ignores unknown fields.
        response: msgspec struct that the caller receives.
    """

    name: str
    request: type[RequestT]
    response: type[ResponseT]

    def __post_init__(self) -> None:
        make_ready(self.request, self.response)
