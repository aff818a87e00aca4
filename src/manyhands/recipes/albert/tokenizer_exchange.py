"""Peers serve the tokenizer of their run, so that a newcomer needs neither the same text nor the same Python.

A newcomer requests it by its digest from the run manifest, and rejects a tokenizer with any other digest.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from manyhands.base.deadline import time_limit
from manyhands.base.errors import ManyhandsError, PeerError, ProtocolViolation, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.recipes.albert.data.tokenizer import tokenizer_digest, tokenizer_from_json, tokenizer_json
from manyhands.recipes.albert.data.tokenizer_file import digest_of_json
from manyhands.recipes.albert.packages import transformers
from manyhands.rpc import Endpoint, Method
from manyhands.rpc.frames import readable

logger = logging.getLogger(__name__)

PART_BYTES = 1 << 16
MAX_BYTES = 16 << 20
MAX_JSON_BYTES = 32 << 20
PART_TIMEOUT_S = 2.0
TIMEOUT_S = 10.0
"""Longest time in seconds for the whole transfer. A tokenizer of 30,000 tokens has 600 KB, compressed."""

FETCH_TIMEOUT_S = TIMEOUT_S + 5.0
"""Longest wait in seconds of another thread for :func:`fetch_tokenizer`, which ends before it."""


class TokenizerRequest(msgspec.Struct, frozen=True):
    """Requests the part of the tokenizer after ``offset`` bytes of its compressed JSON."""

    digest: Annotated[str, msgspec.Meta(max_length=64)]
    offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class TokenizerPart(msgspec.Struct, frozen=True):
    """At most :data:`PART_BYTES` of the compressed JSON, and its total size."""

    part: Annotated[bytes, msgspec.Meta(max_length=PART_BYTES)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]


TOKENIZER = Method("albert.tokenizer", TokenizerRequest, TokenizerPart)


async def serve_tokenizer(endpoint: Endpoint, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    """Serve a tokenizer until the endpoint is closed."""
    digest = tokenizer_digest(tokenizer)
    packed = zlib.compress(tokenizer_json(tokenizer).encode())

    def on_request(remote: PeerId, request: TokenizerRequest) -> TokenizerPart:
        if request.digest != digest:
            raise Refused(endpoint.peer_id, "unknown_tokenizer", "this peer has another tokenizer")
        return TokenizerPart(packed[request.offset : request.offset + PART_BYTES], len(packed))

    endpoint.handle(TOKENIZER, on_request)


async def fetch_tokenizer(
    endpoint: Endpoint, donors: Sequence[PeerId], digest: str
) -> transformers.PreTrainedTokenizerFast | None:
    """Get the tokenizer with this digest from one of the peers of its run; None if none of them sends it.

    Args:
        donors: peers of the run. This peer may be among them, from before a restart.
    """
    try:
        async with time_limit(TIMEOUT_S, "waiting for the tokenizer of the run"):
            for donor in (donor for donor in donors if donor != endpoint.peer_id):
                try:
                    packed = await _fetch(endpoint, donor, digest)
                    return await asyncio.to_thread(_unpacked, donor, packed, digest)
                except (Unavailable, PeerError) as error:
                    logger.info("Could not get the tokenizer of the run from a peer: %s", error)
    except ManyhandsError as error:
        logger.info("%s", error)
    return None


async def _fetch(endpoint: Endpoint, donor: PeerId, digest: str) -> bytes:
    packed = b""
    while True:
        response = await endpoint.call(donor, TOKENIZER, TokenizerRequest(digest, len(packed)), PART_TIMEOUT_S)
        packed += response.part
        if len(packed) >= response.num_bytes:
            return packed
        if not response.part:
            raise ProtocolViolation(donor, "sent only a part of the tokenizer")


def _unpacked(donor: PeerId, packed: bytes, digest: str) -> transformers.PreTrainedTokenizerFast:
    try:
        decompressor = zlib.decompressobj()
        raw = decompressor.decompress(packed, MAX_JSON_BYTES)
        if not decompressor.eof:
            raise ValueError("it is too large, or truncated")
        text = raw.decode()
        if digest_of_json(text) == digest:  # checked first, so that only the run's own tokenizer is parsed
            return tokenizer_from_json(text)
    except (zlib.error, ValueError, RecursionError) as error:
        why = readable(str(error))
        raise ProtocolViolation(donor, f"sent a tokenizer that cannot be read: {why}") from error
    raise ProtocolViolation(donor, "sent another tokenizer than that of the run")
