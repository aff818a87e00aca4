"""The codecs by name, for users, and by code, for the wire."""

from __future__ import annotations

from manyhands.averaging.codecs.codec import BadEncoding, Codec
from manyhands.averaging.codecs.floats import Bf16, Fp16, Plain, PlainFloat64
from manyhands.averaging.codecs.int4 import Int4
from manyhands.averaging.codecs.int8 import Int8
from manyhands.averaging.codecs.sparse import SPARSE, Sparse, sparse_named
from manyhands.base.errors import ConfigError

NONE = Plain()
NONE_FLOAT64 = PlainFloat64()
FP16 = Fp16()
BF16 = Bf16()
INT8 = Int8()
INT4 = Int4()

CODECS: dict[str, Codec] = {codec.name: codec for codec in (NONE, FP16, BF16, INT8, INT4)}
"""Codecs that a user may choose; ``none`` also stands for float64 where the vector is float64."""
_BY_CODE: dict[int, Codec] = {codec.code: codec for codec in CODECS.values()}


def codec_named(name: str) -> Codec:
    """The codec that a user chose.

    Raises:
        ConfigError: no codec has this name.
    """
    if name.startswith(f"{SPARSE}-"):
        return sparse_named(name)
    if (codec := CODECS.get(name)) is None:
        raise ConfigError(f"codec {name!r} is unknown; one of {', '.join(CODECS)}, for example {INT8.name!r}")
    return codec


def codec_of_code(code: int, setting: str) -> Codec:
    """The codec that a peer chose for a vector; no peer chooses that of float64, which follows from the vector.

    Args:
        setting: this peer's own, which has the numbers of a sparse one.
    Raises:
        BadEncoding: no codec that can be chosen has this code.
    """
    if code == Sparse.code and setting.startswith(f"{SPARSE}-"):
        return sparse_named(setting)
    if (codec := _BY_CODE.get(code)) is None:
        raise BadEncoding(f"no codec has code {code}; perhaps that peer is of a later version")
    return codec
