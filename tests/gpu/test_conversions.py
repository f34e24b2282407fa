# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Every kernel equals the reference, bit for bit, through each backend."""

import itertools

import pytest
import torch

from ds_fp4 import formats, ops
from tests import strategies
from tests.gpu.compare import FLOAT_DTYPES, SCALE_DTYPES, assert_same_bits, check, check_quantizers

pytestmark = pytest.mark.usefixtures("kernels")

DEVICE = "cuda"  # tests/unit/test_kernel_sources_warp.py runs some of these on the host

FP4_WIDTHS = (32, 96, 160, 800, 1024, 1056, 2880, 7168)
FP8_WIDTHS = (1, 7, 100, 130, 136, 257, 776, 900, 2880, 7168 + 64)  # short last groups in every step


def _cuda(t: torch.Tensor) -> torch.Tensor:
    return t.to(DEVICE)


# ---- values ----


def _leaders(dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes [n] of all exponents, with significands on both sides of every rounding rule's threshold."""
    mantissa_bits = strategies.MANTISSA_BITS[dtype]
    exponents = torch.arange(255 if dtype == torch.bfloat16 else 31)
    one = 1 << mantissa_bits
    half, quarter = one // 2, one // 4
    mantissas = torch.tensor([0, 1, half - 1, half, half + 1, half + quarter, half + quarter + 1, one - 1])
    return (exponents[:, None] * one + mantissas).flatten().to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES[:2], ids=str)
@pytest.mark.parametrize("block", [32, 128])
def test_every_16_bit_number_under_every_scale(dtype, block):
    values = torch.arange(-(1 << 15), 1 << 15, device=DEVICE).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    values = torch.nn.functional.pad(values, (0, -values.numel() % (block - 1))).view(1, -1, block - 1)
    for leaders in _cuda(_leaders(dtype)).split(256):
        lead = leaders[:, None, None]
        # Too large for the leader's block: zero, so that the leader sets the scale.
        rest = torch.where(values.abs() <= lead, values, torch.zeros_like(values))
        x = torch.cat([lead.expand(-1, rest.shape[1], 1), rest], dim=2).flatten(0, 1).view(leaders.shape[0], -1)
        if block == 32:
            for rounding in formats.SCALE_ROUNDINGS:
                check("bf16_to_fp4_row", x, rounding, host=False)
        else:
            check("bf16_to_fp8_row", x, scale_dtype=torch.uint8, host=False)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("kind", strategies.FINITE_KINDS)
def test_kinds_of_values(dtype, kind):
    x = strategies.make(kind, 33, 1056, dtype, seed=1)
    check_quantizers(_cuda(x))
    check_quantizers(_cuda(strategies.poison(x, seed=2, count=40)))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_random_bits_and_subnormals_at_scale(dtype):
    bits = torch.empty(2048, 7168, dtype=strategies.INT_OF[dtype], device=DEVICE)
    info = torch.iinfo(bits.dtype)
    x = bits.random_(info.min, info.max).view(dtype)
    check_quantizers(x, host=False)
    check_quantizers(x.nan_to_num(0.0, 0.0, 0.0), host=False)
    # Subnormal numbers and those just above them.
    shift = strategies.MANTISSA_BITS[dtype] + 2
    small = (bits & ((1 << shift) - 1)) | (bits & info.min)
    check_quantizers(small.view(dtype), host=False)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_in_every_lane(dtype, bad):
    x = torch.randn(1024, 1024, device=DEVICE).to(dtype)
    lane = torch.arange(1024, device=DEVICE)
    x[lane, lane] = bad
    packed, scales = check("bf16_to_fp4_row", x)
    assert int((scales == 0xFF).sum()) == 1024
    decoded = check("fp4_row_to_bf16", packed, scales)
    assert bool(decoded.view(1024, 32, 32)[lane, lane // 32].isnan().all())
    q, scales = check("bf16_to_fp8_row", x)
    decoded = check("fp8_row_to_bf16", q, scales)
    assert int(decoded.isnan().sum()) == 1024 * 128
    assert bool(decoded.view(1024, 8, 128)[lane, lane // 128].isnan().all())


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_every_scale_byte_and_code_decodes(dtype):
    byte = torch.arange(256, device=DEVICE).to(torch.uint8)
    # MXFP4: each row one scale byte, all pairs of codes.
    check("fp4_row_to_bf16", byte.repeat(256, 1), byte[:, None].repeat(1, 16), dtype=dtype)
    # FP8: all codes under each UE8M0 byte, and under each FP32 power of two, NaN and infinity.
    check("fp8_row_to_bf16", byte.repeat(256, 1), byte[:, None].repeat(1, 2), dtype=dtype)
    exponents = torch.cat([1 << torch.arange(23), torch.arange(1, 256) << 23]).to(torch.int32)
    powers = torch.cat([exponents, torch.tensor([0x7FC00000, 0x7F800001])]).to(torch.int32).view(torch.float32)
    q = byte.repeat(powers.numel(), 1)
    check("fp8_row_to_bf16", q, _cuda(powers)[:, None].repeat(1, 2), dtype=dtype)
    # On a GPU other FP32 scales are not refused: read as the next lower power of two.
    other = torch.empty(512, 2, dtype=torch.int32, device=DEVICE).random_(-(1 << 31), (1 << 31) - 1)
    check("fp8_row_to_bf16", byte.repeat(512, 1), other.view(torch.float32), dtype=dtype, host=False)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_arbitrary_records_decode(dtype):
    for seed, width in enumerate(FP4_WIDTHS):
        check("fp4_row_to_bf16", *map(_cuda, strategies.random_fp4(17, width, seed)), dtype=dtype)
    for seed, (width, scale_dtype) in enumerate(itertools.product(FP8_WIDTHS, SCALE_DTYPES)):
        check("fp8_row_to_bf16", *map(_cuda, strategies.random_fp8(17, width, seed, scale_dtype)), dtype=dtype)


# ---- shapes, gathering, memory layouts ----


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 257])
def test_shapes(dtype, rows):
    for width in sorted({*FP4_WIDTHS, *FP8_WIDTHS}):
        x = _cuda(strategies.make("gaussian", rows, width, dtype, seed=width))
        check_quantizers(x)
        if width % 32 == 0:
            check("fp4_row_to_bf16", *ops.bf16_to_fp4_row(x), dtype=dtype)
        for scale_dtype in SCALE_DTYPES:
            check("fp8_row_to_bf16", *ops.bf16_to_fp8_row(x, scale_dtype=scale_dtype), dtype=dtype)


@pytest.mark.parametrize("width", [96, 100, 2880, 7168])
def test_gathering(width):
    x = _cuda(strategies.make("student_t", 50, width, seed=3))
    lists = [torch.randint(-1, 50, (n,), dtype=torch.int32, device=DEVICE) for n in (1, 333)]
    lists += [torch.full((5,), -1, dtype=torch.int32, device=DEVICE), torch.empty(0, dtype=torch.int32, device=DEVICE)]
    strided = torch.arange(20, dtype=torch.int32, device=DEVICE)
    for index in (*lists, strided):
        check_quantizers(x, index=index)
        if width % 32 == 0:
            packed, scales = ops.bf16_to_fp4_row(x)
            for dtype in FLOAT_DTYPES:
                check("fp4_row_to_bf16", packed, scales, dtype=dtype, index=index)
        for scale_dtype, dtype in itertools.product(SCALE_DTYPES, FLOAT_DTYPES):
            q, scales = ops.bf16_to_fp8_row(x, scale_dtype=scale_dtype)
            check("fp8_row_to_bf16", q, scales, dtype=dtype, index=index)
    # No rows to gather from, zero rows to make.
    nothing = torch.full((3,), -1, dtype=torch.int32, device=DEVICE)
    check_quantizers(x[:0], index=nothing)


def _record_views(rows: int, widths: list[int], start: int, record_bytes: int):
    """uint8 [rows, record_bytes] of a pattern, and views of `widths` bytes side by side in it from `start` on."""
    storage = torch.full((rows * record_bytes + 64,), 0xA5, dtype=torch.uint8, device=DEVICE)
    records = storage[: rows * record_bytes].view(rows, record_bytes)
    views = []
    for width in widths:
        views.append(records[:, start : start + width])
        start += width
    return records, views


@pytest.mark.parametrize("width", [32, 96, 2880, 7168])
@pytest.mark.parametrize(("start", "extra"), [(0, 0), (0, 16), (4, 12), (8, 8), (1, 0), (3, 7), (2, 31)])
def test_records(width, start, extra):
    """Data and scales as views into one buffer, aligned and not, written in place and read in place."""
    x = _cuda(strategies.make("gaussian", 37, width, seed=4))
    for fmt in ("fp4", "fp8"):
        widths = [width // 2, width // 32] if fmt == "fp4" else [width, -(-width // 128)]
        records, (data, scales) = _record_views(37, widths, start, start + sum(widths) + extra)
        if fmt == "fp4":
            expected = formats.bf16_to_fp4_row(x)
            result = ops.bf16_to_fp4_row(x, out=(data, scales))
        else:
            expected = formats.bf16_to_fp8_row(x, scale_dtype=torch.uint8)
            expected = (expected[0].view(torch.uint8), expected[1])
            result = ops.bf16_to_fp8_row(x, scale_dtype=torch.uint8, out=(data, scales))
        assert result[0] is data and result[1] is scales
        assert_same_bits(expected[0], data, "data")
        assert_same_bits(expected[1], scales, "scales")
        # Not a byte beside them was touched.
        assert bool((records[:, :start] == 0xA5).all()) and bool((records[:, start + sum(widths) :] == 0xA5).all())
        for dtype in FLOAT_DTYPES:
            check(f"{fmt}_row_to_bf16", data, scales, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_strided_values(dtype, offset):
    """Inputs and outputs that are column ranges of wider tensors, rows of any distance."""
    wide = _cuda(strategies.make("gaussian", 21, 2048 + offset, dtype, seed=5))
    for width in (96, 1056, 2048):
        x = wide[:, offset : offset + width]
        check_quantizers(x)
        packed, scales = ops.bf16_to_fp4_row(x)
        out = torch.zeros_like(wide)
        view = out[:, offset : offset + width]
        assert ops.fp4_row_to_bf16(packed, scales, dtype=dtype, out=view) is view
        assert_same_bits(formats.fp4_row_to_bf16(packed, scales, dtype=dtype), view.contiguous())
        assert int(out.count_nonzero()) == int(view.count_nonzero())
        q, scales = ops.bf16_to_fp8_row(x)
        ops.fp8_row_to_bf16(q, scales, dtype=dtype, out=view)
        assert_same_bits(formats.fp8_row_to_bf16(q, scales, dtype=dtype), view.contiguous())
    # One row for all: a row stride of zero.
    check_quantizers(wide[:1, offset : offset + 96].expand(9, 96))


def test_fp32_scales_of_another_layout():
    """FP32 scales with rows of any distance, as in a larger buffer."""
    x = torch.randn(64, 7168, device=DEVICE, dtype=torch.bfloat16)
    q, buffer = torch.empty(64, 7168, dtype=torch.uint8, device=DEVICE), torch.zeros(64, 61, device=DEVICE)
    ops.bf16_to_fp8_row(x, out=(q, buffer[:, 3:59]))
    expected = formats.bf16_to_fp8_row(x)
    assert_same_bits(expected[0].view(torch.uint8), q)
    assert_same_bits(expected[1], buffer[:, 3:59].contiguous())
    assert int(buffer.count_nonzero()) == 64 * 56
    check("fp8_row_to_bf16", q, buffer[:, 3:59])


# ---- peers ----


@pytest.mark.parametrize("rounding", formats.SCALE_ROUNDINGS)
def test_bits_are_torchaos(rounding):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    x = torch.randn(512, 7168, device=DEVICE, dtype=torch.bfloat16)
    x *= torch.exp2(torch.randint(-20, 20, (512, 224), device=DEVICE).repeat_interleave(32, dim=1)).to(x.dtype)
    scales, packed = mx.to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode[rounding.upper()])
    got = ops.bf16_to_fp4_row(x, rounding)
    assert_same_bits(scales.view(torch.uint8), got[1])
    assert_same_bits(packed.view(torch.uint8), got[0])
