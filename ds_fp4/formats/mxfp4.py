# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""MXFP4 rows: E2M1 codes with one UE8M0 scale per 32 values along the row."""

import functools

import torch

from . import checks, e2m1, fp32, minifloat, rows, ue8m0
from .blocks import MXFP4_BLOCK, mxfp4_exponents


@torch.no_grad()
def bf16_to_fp4_row(
    x: torch.Tensor,
    scale_rounding: str = "even",
    *,
    index: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to MXFP4.

    A block's scale is 2^(floor(log2 amax') - 2), amax' being the block's largest magnitude after `scale_rounding`
    (see `blocks.SCALE_ROUNDINGS`), with an exponent clamped to [-127, 127]; a value is divided by it and rounded to
    nearest, ties to even, saturating at 6. A zero block gets scale byte 0 and keeps the signs of its zeros; a block
    that holds a NaN or an infinity gets scale byte 0xFF and codes 0.

    The bits equal torchao's `to_mx(x, torch.float4_e2m1fn_x2, 32, mode)` for finite blocks with amax >= 2^-120, with
    one exception: in mode rceil torchao takes log2 in FP32, which for FP32 input cannot tell amax a few units above
    6 * 2^n from 6 * 2^n. Here the smallest scale that needs no saturation is found exactly. Below 2^-120 torchao
    divides by at least 2^-126 and gives subnormal maxima no exponent of their own; here the rule holds for them too.

    Args:
        x: BF16, FP16 or FP32 [M, K], K a multiple of 32, inner stride 1, any row stride.
        scale_rounding: "floor", "rceil", "ceil" or "even".
        index: int32 [R], output row r is made from x[index[r]]; -1 makes a zero row. None: all rows in order.
        out: (packed, scales) to write to and return; inner stride 1, any row stride.

    Returns:
        packed uint8 [R, K/2], the even index in the low nibble; scales uint8 [R, K/32], UE8M0.

    Raises:
        ValueError: on a wrong shape, dtype, device, stride, mode or index.
    """
    packed, scales = checks.prepare_bf16_to_fp4_row(x, scale_rounding, index, out)
    k = x.shape[1]
    for piece in rows.pieces(packed.shape[0], k, x.device):
        bits = fp32.bits_of(rows.take(x, index, piece))
        magnitude = bits & fp32.MAGNITUDE_MASK
        amax = magnitude.view(-1, k // MXFP4_BLOCK, MXFP4_BLOCK).amax(-1)
        finite = amax < fp32.INFINITY_BITS
        exponent = mxfp4_exponents(fp32.ordered(amax), scale_rounding)
        exponent = exponent.clamp_(ue8m0.UE8M0_MIN_EXPONENT, ue8m0.UE8M0_MAX_EXPONENT)
        codes = e2m1.encode_scaled(fp32.scale(magnitude, amax, exponent, MXFP4_BLOCK), bits)
        pairs = e2m1.pack(codes).view(-1, k // MXFP4_BLOCK, MXFP4_BLOCK // 2)
        packed[piece] = pairs.mul_(finite[..., None]).view(-1, k // 2)
        scales[piece] = exponent.add_(ue8m0.UE8M0_BIAS).masked_fill_(~finite, ue8m0.UE8M0_NAN).to(torch.uint8)
    return packed, scales


@functools.cache
def _decode_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256 scale bytes * 256 packed bytes]: both decoded values as one integer, the even one in the low half."""
    fmt = minifloat.OF_DTYPE[dtype]
    scale_byte = torch.arange(256, dtype=torch.int64, device="cpu")
    scale = minifloat.power_of_two(scale_byte - ue8m0.UE8M0_BIAS)
    scale[ue8m0.UE8M0_NAN] = torch.nan
    codes = minifloat.encode(fmt, scale[:, None, None] * e2m1.byte_values())
    pairs = (codes[..., 0] | (codes[..., 1] << fmt.bits)).flatten()
    return (pairs if fmt.bits == 32 else pairs.to(torch.int32)).to(device)


@torch.no_grad()
def fp4_row_to_bf16(
    packed: torch.Tensor,
    scales: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    index: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode MXFP4 rows: E2M1 value * 2^(scale byte - 127), rounded to `dtype` (to nearest, ties to even).

    BF16 and FP32 hold every product but those too large. Those saturate at the dtype's largest value (torchao gives
    infinity); scale byte 0xFF gives NaN.

    Args:
        packed: uint8 [M, K/2], K a multiple of 32. Inner stride 1, any row stride, as for all arguments.
        scales: uint8 [M, K/32], UE8M0.
        dtype: torch.bfloat16, float16 or float32.
        index: int32 [R], output row r is made from input row index[r]; -1 makes a zero row. None: all rows in order.
        out: a tensor [R, K] of `dtype` to write to and return.

    Returns:
        [R, K] of `dtype`.

    Raises:
        ValueError: on a wrong shape, dtype, device, stride or index.
    """
    out = checks.prepare_fp4_row_to_bf16(packed, scales, dtype, index, out)
    table = _decode_table(dtype, packed.device)
    k = out.shape[1]
    for piece in rows.pieces(out.shape[0], k, out.device):
        byte = rows.take(packed, index, piece).to(torch.int32).view(-1, k // MXFP4_BLOCK, MXFP4_BLOCK // 2)
        entry = byte + (rows.take(scales, index, piece).to(torch.int32) << 8)[..., None]
        out[piece] = table.index_select(0, entry.view(-1)).view(dtype).view(-1, k)
    return out
