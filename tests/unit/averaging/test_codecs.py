from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manyhands.averaging.codecs import (
    BF16,
    CODECS,
    FP16,
    INT4,
    INT8,
    NONE,
    NONE_FLOAT64,
    BadEncoding,
    Codec,
    NotFinite,
    codec_named,
    codec_of_code,
    kernels,
)
from manyhands.averaging.codecs.codec import square_of
from manyhands.base.errors import ConfigError

ALL = [*CODECS.values(), NONE_FLOAT64]
LOSSY = [FP16, BF16, INT8, INT4]
MAX = float(torch.finfo(torch.float32).max)
LENGTHS = [0, 1, 31, 32, 33, 215, 216, 217, 65_535]
GOLDEN_VALUES = [0.0, 1.0, -2.0, 0.25, 3.0]
GOLDEN = {
    "none": "000000000000803f000000c00000803e00004040",
    "none_float64": "0000000000000000000000000000f03f00000000000000c0000000000000d03f0000000000000840",
    "fp16": "00000039" + "0000" + "0070" + "00f4" + "0068" + "0076",
    "bf16": "0000" + "803f" + "00c0" + "803e" + "4040",
    "int8": "66990073ff" + "00a0a03c" + "000000c0",
    "int4": "c0be" + "78058d",
}
names = pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)
lossy = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)


@pytest.fixture(autouse=True, params=["torch", "compiled"], scope="module")
def who_works(request: pytest.FixtureRequest) -> Iterator[None]:
    """All of it with torch alone, and with the compiled kernels wherever there is one, however short the vector."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "loaded", {})
        if request.param == "compiled":
            kernels.prepare(kernels.MIN_NUMEL, "auto")
        yield


def encoded(codec: Codec, values_N: torch.Tensor) -> torch.Tensor:
    out = torch.full((codec.num_bytes(values_N.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(values_N, out)
    return out


def decoded(codec: Codec, data: torch.Tensor, numel: int) -> torch.Tensor:
    out_N = torch.full((numel,), math.nan, dtype=codec.dtype)
    codec.decode(data, out_N)
    return out_N


def round_trip(codec: Codec, values_N: torch.Tensor) -> torch.Tensor:
    return decoded(codec, encoded(codec, values_N), values_N.numel())


def blocks_of(values_N: torch.Tensor, size: int) -> list[torch.Tensor]:
    return list(values_N.split(size)) if values_N.numel() else []


def _peak(block: torch.Tensor) -> torch.Tensor:
    return block.max() if block.max() > -block.min() else block.min()


def bound_of(codec: Codec, values_N: torch.Tensor) -> torch.Tensor:
    """The error that the docstrings of the codecs allow for each value, in float64."""
    values_N = values_N.double()
    if codec is FP16:
        largest = [block.abs().max().expand_as(block) for block in blocks_of(values_N, FP16.piece_numel)]
        return values_N.abs() * 2.0**-11 + torch.cat(largest) * 2.0**-39 + 2.0**-149
    if codec is BF16:
        return values_N.abs() * 2.0**-8 + 2.0**-134
    if codec is INT8:
        rows = blocks_of(values_N, 216)
        bounds = [(row.max() - row.min()) / 480 + row.abs().max() * 2.0**-22 + 2.0**-132 for row in rows]
        return torch.cat([bound.expand_as(row) for bound, row in zip(bounds, rows, strict=True)])
    if codec is INT4:
        blocks = blocks_of(values_N, 32)
        peaks = torch.cat([_peak(block).expand_as(block) for block in blocks])
        return peaks.abs() * torch.where(values_N * peaks < 0, 0.134, 0.067) + 2.0**-117
    return torch.zeros_like(values_N)


def check(codec: Codec, values_N: torch.Tensor) -> None:
    result_N = round_trip(codec, values_N)
    assert torch.isfinite(result_N).all()
    error = (result_N.double() - values_N.double()).abs()
    excess = error > bound_of(codec, values_N) if values_N.numel() else error > 0
    assert not excess.any(), (values_N[excess][:3], result_N[excess][:3])


@names
@pytest.mark.parametrize("numel", LENGTHS)
def test_values_of_any_length_decode_within_the_error_bound(codec: Codec, numel: int) -> None:
    values_N = torch.randn(numel, dtype=codec.dtype, generator=torch.Generator().manual_seed(numel))
    check(codec, values_N)


@names
@pytest.mark.parametrize("more", [0, 5])
def test_values_of_more_than_one_piece_decode_within_the_error_bound(codec: Codec, more: int) -> None:
    numel = codec.piece_numel + more
    values_N = torch.randn(numel, dtype=codec.dtype, generator=torch.Generator().manual_seed(numel))
    check(codec, values_N)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
SCALED = st.builds(
    lambda exponent, mantissas: [math.ldexp(m, exponent) for m in mantissas],
    st.integers(-149, 127),
    st.lists(st.floats(-1.75, 1.75, width=32), min_size=1, max_size=500),
)


@lossy
@settings(max_examples=150)
@given(values=st.one_of(st.lists(FLOATS, min_size=1, max_size=500), SCALED))
@example(values=[MAX, -MAX] * 120)
@example(values=[MAX, -MAX, 0.0, 1.0, 1e-45])
@example(values=[MAX] * 33)
@example(values=[0.99 * MAX, MAX])
@example(values=[-MAX] + [1e30] * 240)
@example(values=[0.0] * 217)
@example(values=[-0.0, 1e-45, -1e-45])
@example(values=[1e-38, 1.0e-38 + 1e-45])
@example(values=[1e-9, 2e-9, 1.5e-9])
@example(values=[1000.0, 1000.0001])
def test_arbitrary_values_decode_within_the_error_bound(codec: Codec, values: list[float]) -> None:
    check(codec, torch.tensor(values, dtype=torch.float32))


@pytest.mark.parametrize("numel", [7, 5_000, 65 * 4096 + 1, 96 * 4096, 1 << 20])
def test_the_size_of_values_is_that_of_all_of_them(numel: int) -> None:
    values_N = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    assert square_of(values_N) == pytest.approx(values_N.double().square().sum().item(), rel=1e-5)


@names
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 2.0**-30, 2.0**100])
def test_equal_values_are_exact(codec: Codec, value: float) -> None:
    values_N = torch.full((300,), value, dtype=codec.dtype)
    assert torch.equal(round_trip(codec, values_N), values_N)


@pytest.mark.parametrize("codec", [NONE, FP16, BF16, INT4], ids=lambda codec: codec.name)
def test_zeros_beside_other_values_are_exact(codec: Codec) -> None:
    values_N = torch.randn(10_000)
    values_N[::3] = 0
    assert not round_trip(codec, values_N)[::3].any()


@pytest.mark.parametrize("codec", [NONE, NONE_FLOAT64], ids=lambda codec: codec.name)
def test_the_codec_none_sends_the_memory_of_the_values(codec: Codec) -> None:
    values_N = torch.tensor([0.0, -0.0, 1e-45, MAX, 1 / 3], dtype=codec.dtype)
    assert torch.equal(encoded(codec, values_N), values_N.view(torch.uint8))
    assert torch.equal(round_trip(codec, values_N).view(torch.uint8), values_N.view(torch.uint8))


@pytest.mark.parametrize(
    ("codec", "bits", "squared_error"),
    [(FP16, 16.01, 5e-8), (BF16, 16.0, 3e-6), (INT8, 8.3, 4e-5), (INT4, 4.6, 1e-2)],
    ids=lambda value: getattr(value, "name", None),
)
def test_normal_values_decode_within_the_stated_bits_and_error(codec: Codec, bits: float, squared_error: float) -> None:
    numel = 1_000_000
    values_N = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    data = encoded(codec, values_N)
    assert data.numel() * 8 / numel <= bits
    assert torch.nn.functional.mse_loss(decoded(codec, data, numel), values_N).item() <= squared_error


@lossy
@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1e-4, 1e30])
def test_relative_error_is_the_same_for_small_and_large_values(codec: Codec, scale: float) -> None:
    def error_of(values_N: torch.Tensor) -> float:
        return ((round_trip(codec, values_N) - values_N).double() ** 2).mean().sqrt().item()

    values_N = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    allowed = 1.1 if codec is INT8 else 1.02
    assert error_of(values_N * scale) < allowed * scale * error_of(values_N)


@names
def test_encoded_bytes_never_change(codec: Codec) -> None:
    values_N = torch.tensor(GOLDEN_VALUES, dtype=codec.dtype)
    data = encoded(codec, values_N)
    assert bytes(data.tolist()).hex() == GOLDEN[codec.name]
    check(codec, values_N)


def test_names_and_codes_of_codecs_never_change() -> None:
    assert {codec.name: codec.code for codec in ALL} == {
        "none": 0,
        "none_float64": 1,
        "fp16": 2,
        "bf16": 3,
        "int8": 4,
        "int4": 5,
    }
    for name, codec in CODECS.items():
        assert codec_of_code(codec.code, "") is codec
        assert codec_named(name) is codec
    with pytest.raises(ConfigError, match="codec 'zip' is unknown; one of none, fp16"):
        codec_named("zip")
    with pytest.raises(BadEncoding, match="no codec has code 99"):
        codec_of_code(99, "")


@names
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 100, 216, 300_000])
def test_values_that_are_not_finite_are_refused(codec: Codec, bad: float, place: int) -> None:
    values_N = torch.randn(300_001, dtype=codec.dtype)
    values_N[place] = bad
    with pytest.raises(NotFinite):
        encoded(codec, values_N)


@lossy
def test_infinities_of_both_signs_are_refused(codec: Codec) -> None:
    with pytest.raises(NotFinite):
        encoded(codec, torch.tensor([math.inf, 1.0, -math.inf, math.nan]))


@names
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_of_other_dtypes_are_rounded_to_that_of_the_codec(codec: Codec, dtype: torch.dtype) -> None:
    values_N = torch.randn(1000).to(dtype)
    assert torch.equal(encoded(codec, values_N), encoded(codec, values_N.to(codec.dtype)))


def test_float64_beyond_float32_is_refused() -> None:
    with pytest.raises(NotFinite):
        encoded(NONE, torch.tensor([1e300], dtype=torch.float64))


@names
def test_values_with_gaps_in_memory_encode_as_contiguous_ones(codec: Codec) -> None:
    values_N = torch.randn(2000, dtype=codec.dtype)
    assert torch.equal(encoded(codec, values_N[::2]), encoded(codec, values_N[::2].clone()))


@names
@pytest.mark.parametrize("shift", [1, 2, 3, 4])
def test_bytes_at_any_address_encode_and_decode_the_same(codec: Codec, shift: int) -> None:
    values_N = torch.randn(1003, dtype=codec.dtype)
    data = encoded(codec, values_N)
    shifted = torch.empty(data.numel() + shift, dtype=torch.uint8)[shift:]
    codec.encode(values_N, shifted)
    assert torch.equal(shifted, data)
    assert torch.equal(decoded(codec, shifted, 1003), decoded(codec, data, 1003))
    received = torch.frombuffer(bytearray(bytes(shift)) + bytearray(data.tolist()), dtype=torch.uint8, offset=shift)
    assert torch.equal(decoded(codec, received, 1003), decoded(codec, data, 1003))


@names
@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_codec_refuses_bytes_of_a_wrong_length(codec: Codec, off_by: int) -> None:
    data = torch.zeros(codec.num_bytes(500) + off_by, dtype=torch.uint8)
    with pytest.raises(BadEncoding, match=rf"500 values in {codec.name} are {codec.num_bytes(500)} bytes, but there"):
        decoded(codec, data, 500)


def of_floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(torch.uint8)


@pytest.mark.parametrize(
    ("codec", "header"),
    [
        (INT8, of_floats(math.nan, 0.0)),
        (INT8, of_floats(math.inf, 0.0)),
        (INT8, of_floats(-1.0, 0.0)),
        (INT8, of_floats(1.0, math.nan)),
        (INT8, of_floats(1.0, -math.inf)),
        (INT8, of_floats(1.0 + 2.0**-20, 0.0)),
    ],
)
@pytest.mark.parametrize("numel", [5, 216, 300])
def test_int8_headers_out_of_bounds_are_refused(codec: Codec, header: torch.Tensor, numel: int) -> None:
    data = encoded(codec, torch.randn(numel))
    data[-8:] = header
    with pytest.raises(BadEncoding):
        decoded(codec, data, numel)


def test_int8_scales_of_strangers_give_finite_values() -> None:
    for scale, bias in [(2.0**127, MAX), (2.0**127, -MAX), (2.0**118, 2.0**126), (2.0**-149 * 256, 1e-45)]:
        data = torch.arange(256, dtype=torch.uint8)[-216:]
        assert torch.isfinite(decoded(INT8, torch.cat([data, of_floats(scale, bias)]), 216)).all()


@pytest.mark.parametrize("scale", [0.0, -1.0, 3.0, math.nan, math.inf, 2.0**114, 2.0**-127])
def test_fp16_scales_that_no_encoder_writes_are_refused(scale: float) -> None:
    data = encoded(FP16, torch.randn(5))
    data[:4] = of_floats(scale)
    with pytest.raises(BadEncoding, match="a scale is"):
        decoded(FP16, data, 5)


@pytest.mark.parametrize(("scale", "half"), [(1.0, 0x7C00), (1.0, 0x7E01), (2.0**113, 0x7BFF), (2.0**113, 0xFBFF)])
def test_fp16_values_that_are_not_finite_are_refused(scale: float, half: int) -> None:
    values = torch.tensor([half & 0xFF, half >> 8], dtype=torch.uint8)
    with pytest.raises(BadEncoding, match="NaN or infinite"):
        decoded(FP16, torch.cat([of_floats(scale), values]), 1)


@pytest.mark.parametrize("upper", [0x7F80, 0xFF80, 0x7FC0])
@pytest.mark.parametrize("codec", [BF16, INT4], ids=lambda codec: codec.name)
def test_bfloat16_numbers_that_are_not_finite_are_refused(codec: Codec, upper: int) -> None:
    data = encoded(codec, torch.ones(70))
    data[:2] = torch.tensor([upper & 0xFF, upper >> 8], dtype=torch.uint8)
    with pytest.raises(BadEncoding):
        decoded(codec, data, 70)


@names
@settings(max_examples=100)
@given(data=st.data())
def test_bytes_of_strangers_are_refused_or_give_finite_values(codec: Codec, data: st.DataObject) -> None:
    numel = data.draw(st.integers(1, 300))
    size = codec.num_bytes(numel)
    received = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    with contextlib.suppress(BadEncoding):
        assert torch.isfinite(decoded(codec, received, numel)).all()


def test_int8_decodes_the_same_with_fused_multiplication() -> None:
    values_N = torch.randn(216 * 1000) * torch.randn(1000).repeat_interleave(216)
    data = encoded(INT8, values_N)
    rows = data.view(-1, 224)
    headers = rows[:, 216:].contiguous().view(torch.float32).double()
    fused = (rows[:, :216].double() * headers[:, :1] + headers[:, 1:]).float()
    assert torch.equal(decoded(INT8, data, values_N.numel()), fused.view(-1))


@lossy
def test_threads_do_not_change_the_bytes(codec: Codec) -> None:
    values_N = torch.randn(500_000)
    num_threads = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            data = encoded(codec, values_N)
            results.append((data, decoded(codec, data, values_N.numel())))
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
