"""The compiled kernels against torch, bit for bit."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from manyhands.averaging.codecs import (
    FP16,
    INT8,
    NONE,
    BadEncoding,
    Codec,
    NotFinite,
    Plan,
    Segment,
    Share,
    kernels,
    plan_of,
    product_of,
    square_of,
)

CODECS = pytest.mark.parametrize("codec", [INT8, FP16], ids=lambda codec: codec.name)
NUMEL = 3 * 65_536 + 216 * 5 + 100
"""Whole units of both codecs, and some values that are left to torch."""
UNENCODED_ROW = 1056
"""Values that the kernels process at a time where they are not encoded."""
NOTHING = torch.empty(0)
ODD_ONES = {"huge": 3e38, "tiny": 1e-40, "zero": 0.0, "minus zero": -0.0, "large": 1e36}


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "loaded", {})
    kernels.prepare(kernels.MIN_NUMEL, "auto")


def values(scale: float = 1.0, numel: int = NUMEL) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator) * scale


def encoded(codec: Codec, values_N: torch.Tensor) -> torch.Tensor:
    out = torch.full((codec.num_bytes(values_N.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(values_N, out)
    return out


def decoded(codec: Codec, data: torch.Tensor, numel: int) -> torch.Tensor:
    out_N = torch.full((numel,), math.nan)
    codec.decode(data, out_N)
    return out_N


def add(codec: Codec, data: torch.Tensor, weight: float, total_N: torch.Tensor, *, is_first: bool) -> None:
    plan = Plan([Segment(0, total_N.numel(), codec)])
    plan.add(data, 0, Share(weight, weight), total_N, is_first=is_first, is_largest=False)


def test_kernels_are_compiled_and_used() -> None:
    for codec in (INT8, FP16, NONE):
        for name in ("encode", "decode", "average", "decode_beside"):
            has_kernel = kernels.kernel(codec.name, name, values(), encoded(codec, values())) is not None
            assert has_kernel == (codec is not NONE or name not in ("encode", "decode"))  # a copy is left to torch


@pytest.mark.parametrize("codec", ["int8", "fp16", "none"])
def test_a_change_of_what_is_compiled_into_a_kernel_changes_its_file(codec: str) -> None:
    """Else Numba would go on with what it compiled before, also after an upgrade."""
    folder = Path(kernels.__file__).parent
    inlined = b"".join(path.read_bytes() for path in (folder / "compiling.py", folder.parent / "int8.py"))
    digest = hashlib.sha256(inlined).hexdigest()[:12]
    assert f'INLINED = "{digest}"' in (folder / f"{codec}.py").read_text()


def test_vectors_of_small_models_are_encoded_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "loaded", {})
    kernels.prepare(kernels.MIN_NUMEL - 1, "int8")
    assert kernels.kernel("int8", "encode", values(), encoded(INT8, values())) is None


def test_a_codec_without_kernels_compiles_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "loaded", {})
    monkeypatch.setattr(kernels, "load", lambda codec: pytest.fail(f"{codec} is loaded"))
    for codec in ("bf16", "int4"):
        kernels.prepare(kernels.MIN_NUMEL, codec)
    assert kernels.kernel("int8", "encode", values(), encoded(INT8, values())) is None


def cases() -> Iterator[tuple[str, torch.Tensor]]:
    for exponent in range(-44, 38, 3):
        yield f"1e{exponent}", values(10.0**exponent)
    yield "equal", torch.full((NUMEL,), -3.7)
    yield "steps of one row", torch.arange(NUMEL, dtype=torch.float32)
    for name, odd in ODD_ONES.items():
        with_odd = values()
        with_odd[70_000] = odd
        yield name, with_odd


@CODECS
@pytest.mark.parametrize("values_N", [pytest.param(values_N, id=name) for name, values_N in cases()])
def test_kernels_give_the_same_bits_as_torch(
    codec: Codec, values_N: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = encoded(codec, values_N)
    read = decoded(codec, written, NUMEL)
    total = values(0.1)
    add(codec, written, 0.3, total, is_first=False)
    first = values()
    add(codec, written, 0.3, first, is_first=True)

    monkeypatch.setattr(kernels, "loaded", {})
    assert torch.equal(encoded(codec, values_N), written)
    assert torch.equal(decoded(codec, written, NUMEL), read)
    assert torch.equal(first, read * 0.3)
    assert torch.equal(total, values(0.1) + read * 0.3)


@CODECS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 70_000, NUMEL - 1])
def test_kernels_refuse_to_encode_values_that_are_not_finite(codec: Codec, bad: float, place: int) -> None:
    values_N = values()
    values_N[place] = bad
    with pytest.raises(NotFinite):
        encoded(codec, values_N)


@CODECS
def test_kernels_refuse_bytes_that_no_encoder_writes(codec: Codec) -> None:
    data = encoded(codec, values())
    data[-300:] = 0xFF
    with pytest.raises(BadEncoding):
        add(codec, data, 0.5, values(), is_first=True)
    with pytest.raises(BadEncoding):
        add(codec, data[:-1], 0.5, values(), is_first=True)


def test_a_plan_adds_part_by_part() -> None:
    shapes = [(300, 300), (7,), (250, 300)]
    for codec in (INT8, FP16):
        plan = plan_of(shapes, codec)
        values_N = values(numel=plan.numel)
        written = torch.empty(plan.num_bytes(0, plan.numel), dtype=torch.uint8)
        plan.encode(values_N, 0, written)
        read = torch.empty_like(values_N)
        plan.decode(written, 0, read)
        total = values_N.clone()
        plan.add(written, 0, Share(0.5, 0.5), total, is_first=False, is_largest=False)
        torch.testing.assert_close(total, values_N + 0.5 * read, rtol=0, atol=1e-6)
        with pytest.raises(BadEncoding):
            plan.add(written[1:], 0, Share(0.5, 0.5), total, is_first=False, is_largest=False)


@CODECS
@pytest.mark.parametrize("own_place", [0, 1, 2, None], ids=str)
def test_averaging_in_one_pass_gives_the_same_bits(codec: Codec, own_place: int | None) -> None:
    numel = NUMEL // codec.unit_numel * codec.unit_numel
    given = [values(scale, numel) for scale in (1.0, 0.1, 5.0)]
    num_bytes = codec.num_bytes(numel)
    rooms = torch.zeros(6, num_bytes + 64 - num_bytes % 64, dtype=torch.uint8)
    which = [-1 if number == own_place else 5 - 2 * number for number in range(3)]
    for values_N, room in zip(given, which, strict=True):
        if room >= 0:
            codec.encode(values_N, rooms[room, :num_bytes])
    weights = [0.2, 0.5, 0.3]

    expected_N, expected = torch.empty(numel), torch.empty(num_bytes, dtype=torch.uint8)
    for number, room in enumerate(which):
        if room >= 0:
            add(codec, rooms[room, :num_bytes], weights[number], expected_N, is_first=number == 0)
        elif number == 0:
            torch.mul(given[number], weights[number], out=expected_N)
        else:
            expected_N += given[number] * weights[number]  # rounded twice, as the kernel does
    codec.encode(expected_N, expected)
    codec.decode(expected, expected_N)

    own_N = given[own_place] if own_place is not None else given[0]
    mean_N, out = torch.full((numel,), math.nan), torch.empty(num_bytes, dtype=torch.uint8)
    sums = np.zeros((3, 2))
    assert codec.average(own_N, NOTHING, rooms, which, weights, mean_N, out, sums) == numel
    assert torch.equal(out, expected)
    assert torch.equal(mean_N, expected_N)

    kept_N, in_place_N = torch.full((numel,), math.nan), own_N.clone()
    assert codec.average(in_place_N, kept_N, rooms, which, weights, in_place_N, out.zero_(), sums) == numel
    assert torch.equal(out, expected)
    assert torch.equal(in_place_N, expected_N)
    assert torch.equal(kept_N, own_N)
    assert (sums[:, 0] / 2).tolist() == pytest.approx(list(map(square_of, given)), rel=1e-3)
    products = [product_of(mean_N, values_N) for values_N in given]
    assert (sums[:, 1] / 2).tolist() == pytest.approx(products, rel=1e-3, abs=1e-3 * float(mean_N.norm()))


@pytest.mark.parametrize("codec", [INT8, FP16, NONE], ids=lambda codec: codec.name)
@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("numel", [NUMEL, 100])
@pytest.mark.parametrize("is_unusual", [False, True])
def test_decoding_beside_other_values_gives_the_same_bits(
    codec: Codec, is_in_place: bool, numel: int, is_unusual: bool
) -> None:
    given, own_N = values(1.0, numel), values(3.0, numel)
    if is_unusual:
        given[numel // 2] = 1e38  # the kernels leave it to torch
    packed, expected_N = encoded(codec, given), torch.empty(numel)
    codec.encode(given, packed)
    codec.decode(packed, expected_N)
    sums = product_of(expected_N, own_N), square_of(expected_N), square_of(own_N)
    out_N = own_N if is_in_place else torch.full((numel,), math.nan)
    found = codec.decode_beside(packed, out_N, own_N)
    assert torch.equal(out_N, expected_N)
    length = math.sqrt(sums[1] * sums[2])
    assert found == pytest.approx(sums, rel=1e-4, abs=1e-4 * length)
    with pytest.raises(BadEncoding):
        codec.decode_beside(packed[:-1], out_N, own_N)


@CODECS
def test_averaging_in_one_pass_stops_where_somebody_breaks_the_rules(codec: Codec) -> None:
    own_N, given = values(), values(2.0)
    rooms = torch.zeros(2, codec.num_bytes(NUMEL) + 64, dtype=torch.uint8)
    rooms = rooms[:, : rooms.shape[1] // 4 * 4].contiguous()
    codec.encode(given, rooms[1, : codec.num_bytes(NUMEL)])
    out = torch.empty(codec.num_bytes(NUMEL), dtype=torch.uint8)
    own_N[70_000] = math.inf
    done = codec.average(own_N, NOTHING, rooms, [-1, 1], [0.5, 0.5], torch.empty(NUMEL), out, np.zeros((2, 2)))
    assert done == 70_000 // codec.unit_numel * codec.unit_numel
    scale_at = codec.num_bytes(2 * codec.unit_numel) - (8 if codec is INT8 else 2 * codec.unit_numel + 4)
    rooms[1, scale_at : scale_at + 4] = 0xFF
    sums = np.zeros((2, 2))
    done = codec.average(own_N, NOTHING, rooms, [-1, 1], [0.5, 0.5], torch.empty(NUMEL), out, sums)
    assert done == codec.unit_numel
    assert sums[:, 0].tolist() == pytest.approx([square_of(own_N[:done]), square_of(given[:done])], rel=0.01)


@CODECS
@pytest.mark.parametrize("is_own", [True, False])
def test_values_below_an_unfinished_in_place_mean_are_kept(codec: Codec, is_own: bool) -> None:
    own_N = values()
    rooms = torch.zeros(1, codec.num_bytes(NUMEL) + 64, dtype=torch.uint8)
    rooms = rooms[:, : rooms.shape[1] // 4 * 4].contiguous()
    codec.encode(values(2.0), rooms[0, : codec.num_bytes(NUMEL)])
    if is_own:
        own_N[70_000] = math.inf
    else:
        scale_at = codec.num_bytes(2 * codec.unit_numel) - (8 if codec is INT8 else 2 * codec.unit_numel + 4)
        rooms[0, scale_at : scale_at + 4] = 0xFF
    out = torch.empty(codec.num_bytes(NUMEL), dtype=torch.uint8)
    kept_N, in_place_N = torch.full((NUMEL,), math.nan), own_N.clone()
    done = codec.average(in_place_N, kept_N, rooms, [0, -1], [0.5, 0.5], in_place_N, out, np.zeros((2, 2)))
    assert 0 < done < NUMEL
    assert torch.equal(kept_N[:done], own_N[:done])
    assert torch.equal(in_place_N[done:], own_N[done:])


WHOLE = NUMEL // UNENCODED_ROW * UNENCODED_ROW


@pytest.mark.parametrize("own_place", [0, 1, 2, None], ids=str)
def test_unencoded_values_are_averaged_in_one_pass(own_place: int | None) -> None:
    given, weights = [values(scale) for scale in (1.0, 0.1, 5.0)], [0.2, 0.5, 0.3]
    rooms = torch.zeros(6, NONE.num_bytes(NUMEL), dtype=torch.uint8)
    which = [-1 if number == own_place else 5 - 2 * number for number in range(3)]
    for values_N, room in zip(given, which, strict=True):
        if room >= 0:
            NONE.encode(values_N, rooms[room])
    expected_N = given[0] * weights[0]
    for values_N, weight in zip(given[1:], weights[1:], strict=True):
        expected_N += values_N * weight

    own_N, mean_N = given[own_place or 0], torch.full((NUMEL,), math.nan)
    sums = np.zeros((3, 2))
    assert NONE.average(own_N, NOTHING, rooms, which, weights, mean_N, mean_N.view(torch.uint8), sums) == WHOLE
    assert torch.equal(mean_N[:WHOLE], expected_N[:WHOLE])
    kept_N, in_place_N = torch.full((NUMEL,), math.nan), own_N.clone()
    encoded_N = in_place_N.view(torch.uint8)
    assert NONE.average(in_place_N, kept_N, rooms, which, weights, in_place_N, encoded_N, sums) == WHOLE
    assert torch.equal(in_place_N[:WHOLE], expected_N[:WHOLE])
    assert torch.equal(in_place_N[WHOLE:], own_N[WHOLE:])
    assert torch.equal(kept_N[:WHOLE], own_N[:WHOLE])
    whole = [values_N[:WHOLE] for values_N in given]
    assert (sums[:, 0] / 2).tolist() == pytest.approx(list(map(square_of, whole)), rel=1e-4)
    products = [product_of(expected_N[:WHOLE], values_N) for values_N in whole]
    assert (sums[:, 1] / 2).tolist() == pytest.approx(products, rel=1e-4, abs=1e-2 * float(mean_N[:WHOLE].norm()))


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e38])
def test_averaging_of_unencoded_values_stops_at_one_that_is_not_finite(is_own: bool, bad: float) -> None:
    """Or one whose square is not."""
    own_N, other_N = values(), values(2.0)
    (own_N if is_own else other_N)[70_000] = bad
    kept_N, in_place_N = torch.full((NUMEL,), math.nan), own_N.clone()
    rooms = other_N.view(torch.uint8).unsqueeze(0)
    sums = np.zeros((2, 2))
    encoded_N = in_place_N.view(torch.uint8)
    done = NONE.average(in_place_N, kept_N, rooms, [0, -1], [0.5, 0.5], in_place_N, encoded_N, sums)
    assert done == 70_000 // UNENCODED_ROW * UNENCODED_ROW
    torch.testing.assert_close(in_place_N[done:], own_N[done:], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(kept_N[:done], own_N[:done])
    assert sums[:, 0].tolist() == pytest.approx([square_of(other_N[:done]), square_of(own_N[:done])], rel=1e-4)


@CODECS
@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_values_are_decoded_to_any_address(codec: Codec, offset: int) -> None:
    """Whole lines of the cache are written at once where they begin at the right address."""
    data = encoded(codec, values())
    memory = torch.full((NUMEL + offset + 1,), 7.0)
    codec.decode(data, memory[offset : offset + NUMEL])
    assert torch.equal(memory[offset : offset + NUMEL], decoded(codec, data, NUMEL))
    assert memory[:offset].eq(7.0).all()
    assert memory[-1] == 7.0
