"""Chooses the codec of a round, unless the user did: exact where links are fast, else 8 bits. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from manyhands.averaging.codecs import INT8, NONE, BadEncoding, Codec, codec_named, codec_of_code
from manyhands.averaging.config import AUTO

WIDE_AREA_RTT_S = 0.01
"""Round trip; within one site it is shorter."""

SLOW_BYTES_PER_S = 25_000_000
"""Below this rate, sending a quarter of the bytes saves far more time than encoding takes."""


def chosen_codec(setting: str, bandwidths: Iterable[int], rtts_s: Iterable[float]) -> Codec:
    """The codec of a round, as its leader chooses it.

    Args:
        bandwidths: bytes per second of the members; 0 if unknown.
        rtts_s: round trips between the leader and the others; infinite if unknown.
    """
    if setting != AUTO:
        return codec_named(setting)
    is_slow = any(0 < bandwidth < SLOW_BYTES_PER_S for bandwidth in bandwidths)
    is_far = any(WIDE_AREA_RTT_S < rtt_s < float("inf") for rtt_s in rtts_s)
    return INT8 if is_slow or is_far else NONE


def allowed_codec(setting: str, code: int) -> Codec:
    """The codec that a leader chose, if this peer's setting allows it.

    Raises:
        BadEncoding: it does not, or there is no such codec.
    """
    codec = codec_of_code(code, setting)
    if setting not in (AUTO, codec.name) and not codec.passes_on:  # that one is made from the setting
        raise BadEncoding(f"codec {codec.name!r}, but this peer's is {setting!r}")
    return codec
