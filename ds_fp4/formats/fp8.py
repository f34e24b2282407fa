# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""FP8 rows: E4M3 codes with one power-of-two scale per 128 values along the row, the last group short if need be."""

import functools

import torch

from . import checks, e4m3, fp32, minifloat, rows, ue8m0
from .blocks import FP8_GROUP, fp8_exponents


@torch.no_grad()
def bf16_to_fp8_row(
    x: torch.Tensor,
    *,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    index: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to FP8.

    The scale of a group is 2^ceil(log2(amax / 448)), with an exponent clamped to [-127, 127]; a value is divided by it
    and rounded to nearest, ties to even. A zero group gets exponent -127 and keeps the signs of its zeros; a group
    that holds a NaN or an infinity gets exponent -127 and NaN codes (0x7F) throughout.

    Args:
        x: BF16, FP16 or FP32 [M, K], inner stride 1, any row stride.
        scale_dtype: torch.float32 for powers of two (2^-127 is subnormal and kept), torch.uint8 for UE8M0.
        scale_layout: "row", or "gemm" for FP32 scales with strides (1, R rounded up to 4) and no exponent under -126,
            as Hopper's GEMM libraries read them: they take subnormal numbers for zeros.
        index: int32 [R], output row r is made from x[index[r]]; -1 makes a zero row. None: all rows in order.
        out: (q, scales) to write to and return, q as float8_e4m3fn or uint8; inner stride 1, any row stride.

    Returns:
        q float8_e4m3fn [R, K]; scales [R, ceil(K/128)] of `scale_dtype`.

    Raises:
        ValueError: on a wrong shape, dtype, device, stride or index.
    """
    result = checks.prepare_bf16_to_fp8_row(x, scale_dtype, scale_layout, index, out)
    q, scales = result[0].view(torch.uint8), result[1]
    k, groups = x.shape[1], scales.shape[1]
    lowest = max(ue8m0.UE8M0_MIN_EXPONENT, ue8m0.min_exponent(scale_dtype, scale_layout))
    for piece in rows.pieces(q.shape[0], groups * FP8_GROUP, x.device):
        bits = rows.pad_columns(fp32.bits_of(rows.take(x, index, piece)), FP8_GROUP)
        magnitude = bits & fp32.MAGNITUDE_MASK
        amax = magnitude.view(-1, groups, FP8_GROUP).amax(-1)
        finite = amax < fp32.INFINITY_BITS
        exponent = fp8_exponents(fp32.ordered(amax))
        exponent = exponent.masked_fill_(~finite, ue8m0.UE8M0_MIN_EXPONENT).clamp_(min=lowest)
        codes = e4m3.encode_scaled(fp32.scale(magnitude, amax, exponent, FP8_GROUP), bits)
        codes = codes.view(-1, groups, FP8_GROUP).masked_fill_(~finite[..., None], e4m3.E4M3_NAN)
        q[piece] = codes.view(-1, groups * FP8_GROUP)[:, :k]
        ue8m0.store(exponent, scales[piece])
    return result


@functools.cache
def _decode_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[278 exponents -149..128 * 256 codes]: decoded values as integers; the last exponent stands for NaN."""
    fmt = minifloat.OF_DTYPE[dtype]
    exponent = torch.arange(ue8m0.FP32_MIN_EXPONENT, ue8m0.NAN_EXPONENT + 1, dtype=torch.int64, device="cpu")
    scale = minifloat.power_of_two(exponent)
    scale[-1] = torch.nan
    codes = minifloat.encode(fmt, scale[:, None] * e4m3.code_values()).flatten()
    return codes.to(torch.int32 if fmt.bits == 32 else torch.int16).to(device)


@torch.no_grad()
def fp8_row_to_bf16(
    q: torch.Tensor,
    scales: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    index: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode FP8 rows: E4M3 value * scale, rounded to `dtype` (to nearest, ties to even).

    Products too large saturate at the dtype's largest value. NaN codes, and NaN scales (UE8M0 0xFF, FP32 NaN or
    infinity), give NaN.

    Args:
        q: float8_e4m3fn, or its bytes as uint8, [M, K]. Inner stride 1, any row stride, as for all arguments.
        scales: [M, ceil(K/128)], uint8 (UE8M0) or float32 powers of two. On a GPU that is not checked.
        dtype: torch.bfloat16, float16 or float32.
        index: int32 [R], output row r is made from input row index[r]; -1 makes a zero row. None: all rows in order.
        out: a tensor [R, K] of `dtype` to write to and return.

    Returns:
        [R, K] of `dtype`.

    Raises:
        ValueError: on a wrong shape, dtype, device, stride or index, or (host tensors) a scale no power of two.
    """
    out = checks.prepare_fp8_row_to_bf16(q, scales, dtype, index, out)
    table = _decode_table(dtype, q.device)
    codes, exponent = q.view(torch.uint8), ue8m0.exponents(scales)
    k, groups = q.shape[1], scales.shape[1]
    for piece in rows.pieces(out.shape[0], groups * FP8_GROUP, out.device):
        code = rows.pad_columns(rows.take(codes, index, piece), FP8_GROUP).to(torch.int32)
        row = rows.take(exponent, index, piece) - ue8m0.FP32_MIN_EXPONENT
        entry = code.view(-1, groups, FP8_GROUP) + (row << 8)[..., None]
        values = table.index_select(0, entry.view(-1)).view(dtype).view(-1, groups * FP8_GROUP)
        out[piece] = values[:, :k]
    return out
