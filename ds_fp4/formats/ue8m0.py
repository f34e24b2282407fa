# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""UE8M0 scale bytes (OCP MX specification 1.0, section 5.4.1) and the same scales as FP32 powers of two.

Inside the reference a scale is its integer exponent; `NAN_EXPONENT` (byte 0xFF, or an FP32 scale that is NaN or
infinite) marks a scale that decodes to NaN.
"""

import torch

from . import fp32

UE8M0_BIAS = 127
UE8M0_NAN = 0xFF
UE8M0_MIN_EXPONENT = -127
UE8M0_MAX_EXPONENT = 127

FP32_MIN_EXPONENT = -149  # the smallest FP32 subnormal
FP32_MIN_NORMAL_EXPONENT = -126
NAN_EXPONENT = UE8M0_NAN - UE8M0_BIAS

SCALE_DTYPES = (torch.float32, torch.uint8)


# How scales of FP8 rows lie in memory. "gemm" is what Hopper's FP8 GEMM libraries read as it is: FP32, those of one
# group of consecutive rows side by side, 16 bytes aligned. They flush subnormal numbers: scales are normal ones.
SCALE_LAYOUTS = ("row", "gemm")
# Of columns that are made from rows, also one for 128 x 128 codes (see `columns`), normal as well.
COLUMN_SCALE_LAYOUTS = (*SCALE_LAYOUTS, "blocks")


def min_exponent(dtype: torch.dtype, scale_layout: str = "row") -> int:
    """Lowest exponent a scale of `dtype` (uint8 for UE8M0, or float32) can hold in a layout."""
    if scale_layout != "row":
        return FP32_MIN_NORMAL_EXPONENT
    return UE8M0_MIN_EXPONENT if dtype == torch.uint8 else FP32_MIN_EXPONENT


def exponents(scales: torch.Tensor) -> torch.Tensor:
    """int32 exponents of UE8M0 (uint8) or FP32 power-of-two scales; 128 stands for NaN.

    Of an FP32 scale that is not a power of two, floor(log2) is taken; of zero, -149.
    """
    if scales.dtype == torch.uint8:
        return scales.to(torch.int32) - UE8M0_BIAS
    bits = fp32.ordered(scales.view(torch.int32) & fp32.MAGNITUDE_MASK)
    return ((bits >> fp32.MANTISSA_BITS) - fp32.EXPONENT_BIAS).clamp(min=FP32_MIN_EXPONENT)


def are_powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Whether each FP32 scale is a positive power of two (subnormals included), NaN or infinite: a bool tensor."""
    bits = scales.view(torch.int32)
    magnitude = bits & fp32.MAGNITUDE_MASK
    fraction = magnitude & (fp32.MIN_NORMAL_BITS - 1)
    subnormal = (magnitude > 0) & (magnitude < fp32.MIN_NORMAL_BITS) & ((fraction & (fraction - 1)) == 0)
    normal = (magnitude >= fp32.MIN_NORMAL_BITS) & (fraction == 0)
    return (magnitude >= fp32.INFINITY_BITS) | ((bits > 0) & (normal | subnormal))


def store(exponent: torch.Tensor, out: torch.Tensor) -> None:
    """Write scales 2^exponent (int32, from `min_exponent(out.dtype)` to 127) into `out` (uint8 or float32)."""
    if out.dtype == torch.uint8:
        out.copy_((exponent + UE8M0_BIAS).to(torch.uint8))
        return
    normal = (exponent + fp32.EXPONENT_BIAS) << fp32.MANTISSA_BITS
    subnormal = torch.bitwise_left_shift(torch.ones_like(exponent), (exponent - FP32_MIN_EXPONENT).clamp(0, 22))
    # Through integers: a copy of FP32 values might flush the subnormal ones.
    out.view(torch.int32).copy_(torch.where(exponent < 1 - fp32.EXPONENT_BIAS, subnormal, normal))
