"""Fuzz targets: encoded values of a round, and what reducers tell of them."""

from __future__ import annotations

import functools

import torch

from manyhands.averaging.allreduce.checks import NO_MEANS, SpanCheck, Told, product_with
from manyhands.averaging.allreduce.means import BadRecord, MeansRecords
from manyhands.averaging.codecs import CODECS, NONE_FLOAT64, BadEncoding, Codec, Plan, Segment, Sparse, shares_of
from tests.fuzz.target import Target

NUMEL = 500
PLAN = Plan([Segment(0, 100, CODECS["int8"]), Segment(100, 150, CODECS["none"]), Segment(150, 400, CODECS["int4"])])

EXACT = Plan([Segment(0, 6, CODECS["none"])])
WEIGHTS, SCALES = [1.0, 2.0, 0.0], [1.0, 0.5, 1.0]
OWN, MEANS = torch.linspace(-1, 1, 3), torch.linspace(-0.5, 2, 6)  # the norm of twice OWN is 2
RECORDS = MeansRecords(3, [0, 1], is_measured=True, has_products=True)


def _numel_of(codec: Codec, num_bytes: int) -> int:
    """The number of values that take so many bytes, so that the decoder does more than to refuse the length."""
    return next((numel for numel in range(NUMEL + 1) if codec.num_bytes(numel) >= num_bytes), NUMEL)


def _decode(codec: Codec, data: bytes) -> None:
    out_N = torch.empty(_numel_of(codec, len(data)), dtype=codec.dtype)
    codec.decode(torch.tensor(list(data), dtype=torch.uint8), out_N)
    assert torch.isfinite(out_N).all()


def _decode_slice(data: bytes) -> None:
    out = torch.empty(PLAN.numel)
    PLAN.decode(torch.tensor(list(data), dtype=torch.uint8), 0, out)
    assert torch.isfinite(out).all()


def _seeds(codec: Codec) -> list[bytes]:
    seeds = []
    for numel, scale in [(1, 1.0), (300, 1e-3), (NUMEL, 1e38)]:
        out = torch.empty(codec.num_bytes(numel), dtype=torch.uint8)
        codec.encode(torch.linspace(-1, 2, numel) * scale, out)
        seeds.append(bytes(out.tolist()))
    return seeds


def _slice() -> bytes:
    out = torch.empty(PLAN.num_bytes(0, PLAN.numel), dtype=torch.uint8)
    PLAN.encode(torch.linspace(-1, 2, PLAN.numel), 0, out)
    return bytes(out.tolist())


def _check_means(data: bytes) -> None:
    """Read what a reducer tells after its means, and check these by it, as rank 0 does.

    The two numbers about rank 0 are put right, else nothing behind their check would be tried.
    """
    size = RECORDS.num_bytes(2)
    presents, told = RECORDS.read(data[:size].ljust(size, b"\0"))
    if not all(0 in present for present in presents):
        return  # said of the reducer before
    check = SpanCheck(EXACT, 0, WEIGHTS, SCALES, 2, 0.0)
    told.norms[0], told.products[0] = 2.0, 0.0
    for number, (start, present) in enumerate(zip((0, 3), presents, strict=True)):
        mean = MEANS[start : start + 3]
        check.add(number, start, mean, OWN)
        told.products[0] += product_with(EXACT, start, mean, shares_of(WEIGHTS, SCALES, present)[0], OWN)
    assert check.fault(presents, told) in ("", NO_MEANS)


TARGETS = [
    *(
        Target(
            name=f"codec.{codec.name}",
            seeds=_seeds(codec),
            run=functools.partial(_decode, codec),
            errors=(BadEncoding,),
            kind="bytes",
            weight=0.3,
        )
        for codec in (*CODECS.values(), NONE_FLOAT64, Sparse(top=10, chunk=200))
    ),
    Target(
        name="averaging.means-record",
        seeds=[RECORDS.encode([[0, 1], [0]], Told([1.5, 2.5, 0.0], [0.5, 1.0, 0.0]))],
        run=_check_means,
        errors=(BadRecord,),
        kind="bytes",
        weight=0.3,
    ),
    Target(name="codec.slice", seeds=[_slice()], run=_decode_slice, errors=(BadEncoding,), kind="bytes", weight=0.3),
]
