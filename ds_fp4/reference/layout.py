# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What the fused calls share: formats of rows by name, and where FP8 scales lie for a GEMM."""

from collections.abc import Sequence

import torch

from ds_fp4.formats import FP8_GROUP, MXFP4_BLOCK, checks, e4m3, fp32, ue8m0
from ds_fp4.formats.blocks import fp8_exponents

SCALE_LAYOUTS = ("row", "gemm")
BF16 = (torch.bfloat16,)

# The lowest scale exponent in each layout: a GEMM library may flush subnormal scales.
LOWEST_EXPONENT = {"row": ue8m0.UE8M0_MIN_EXPONENT, "gemm": 1 - fp32.EXPONENT_BIAS}

_BF16_LARGEST_BITS = 0x7F7F0000

Pair = tuple[torch.Tensor, torch.Tensor]


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(repr(choice) for choice in allowed)}, got {value!r}")


def new_scales(rows: int, groups: int, scale_layout: str, device: torch.device) -> torch.Tensor:
    """FP32 [rows, groups], contiguous ("row") or as GEMMs read them."""
    if scale_layout == "gemm":
        return checks.new_gemm_scales(rows, groups, device)
    return torch.empty(rows, groups, dtype=torch.float32, device=device)


def check_scales(name: str, t: torch.Tensor, shape: tuple[int, int], device: torch.device) -> None:
    """FP32 scales with any strides, as an output."""
    if not isinstance(t, torch.Tensor) or t.dtype != torch.float32:
        raise ValueError(f"{name} must be a float32 tensor, got {getattr(t, 'dtype', type(t).__name__)}")
    if t.device != device:
        raise ValueError(f"{name} must be on {device} like the input, got {t.device}")
    checks.check_shape(name, t, shape)


def check_rows(name: str, rows: torch.Tensor | Pair, row_format: str) -> tuple[int, int, torch.device]:
    """Rows M, values a row K and device of BF16 rows or MXFP4 or FP8 (packed or q, scales)."""
    if row_format == "bf16":
        checks.check_tensor(name, rows, BF16, None, 2)
        m, k = rows.shape
        checks.check_width(name, k, 1)
        return m, k, rows.device
    if not isinstance(rows, (tuple, list)) or len(rows) != 2:
        names = "(packed, scales)" if row_format == "mxfp4" else "(q, scales)"
        raise ValueError(f"{name} must be the pair {names} for format {row_format!r}, got {type(rows).__name__}")
    m, k = checks.check_fp4_rows(*rows) if row_format == "mxfp4" else checks.check_fp8_rows(*rows)
    return m, k, rows[0].device


def new_rows(rows: int, k: int, row_format: str, device: torch.device) -> torch.Tensor | Pair:
    """Rows to write to: BF16, or records in two tensors with UE8M0 scales."""
    if row_format == "bf16":
        return torch.empty(rows, k, dtype=torch.bfloat16, device=device)
    if row_format == "mxfp4":
        packed = torch.empty(rows, k // 2, dtype=torch.uint8, device=device)
        return packed, torch.empty(rows, k // MXFP4_BLOCK, dtype=torch.uint8, device=device)
    q = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=device)
    return q, torch.empty(rows, -(-k // FP8_GROUP), dtype=torch.uint8, device=device)


def check_out_rows(
    name: str, out: torch.Tensor | Pair, rows: int, k: int, row_format: str, device: torch.device
) -> None:
    """`out` is what `new_rows` would make, with any row strides; FP8 scales may be FP32 too."""
    if row_format == "bf16":
        parts = ((name, out, BF16, k),)
    elif not isinstance(out, (tuple, list)) or len(out) != 2:
        names = "(packed, scales)" if row_format == "mxfp4" else "(q, scales)"
        raise ValueError(f"{name} must be the pair {names} for format {row_format!r}, got {type(out).__name__}")
    elif row_format == "mxfp4":
        parts = (
            (f"{name}'s packed", out[0], checks.BYTES, k // 2),
            (f"{name}'s scales", out[1], checks.BYTES, k // MXFP4_BLOCK),
        )
    else:
        groups = -(-k // FP8_GROUP)
        parts = (
            (f"{name}'s q", out[0], e4m3.CODE_DTYPES, k),
            (f"{name}'s scales", out[1], ue8m0.SCALE_DTYPES, groups),
        )
    for part, t, dtypes, columns in parts:
        checks.check_out(part, t, (rows, columns), dtypes, device)


def quantize_fp8_rows(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, lowest_exponent: int) -> None:
    """`formats.bf16_to_fp8_row` of FP32 [M, K], K a multiple of 128, with a lowest exponent of its own.

    A magnitude above BF16's largest number counts as infinite. Where a group's scale would be lower, the lowest is
    taken and codes are rounded under it: the nearest normal scale for `LOWEST_EXPONENT["gemm"]`. Zero groups and
    groups with a non-finite value get the lowest one too.
    """
    m, k = x.shape
    bits = fp32.bits_of(x)
    magnitude = bits & fp32.MAGNITUDE_MASK
    amax = magnitude.view(m, k // FP8_GROUP, FP8_GROUP).amax(-1)
    finite = amax <= _BF16_LARGEST_BITS
    exponent = fp8_exponents(fp32.ordered(amax)).masked_fill_(~finite, lowest_exponent).clamp_(min=lowest_exponent)
    codes = e4m3.encode_scaled(fp32.scale(magnitude, amax, exponent, FP8_GROUP), bits)
    codes = codes.view(m, k // FP8_GROUP, FP8_GROUP).masked_fill_(~finite[..., None], e4m3.E4M3_NAN)
    q.view(torch.uint8).copy_(codes.view(m, k))
    ue8m0.store(exponent, scales)
