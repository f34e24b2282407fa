# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""How many values share a scale, and the scale that a block's largest magnitude calls for.

Each rule is an addition to FP32 bits: floor(log2) of a positive number is its exponent field, and adding a constant
below one unit of that field first carries into it from a chosen significand on.
"""

import torch

from . import e2m1, e4m3, fp32

MXFP4_BLOCK = 32
FP8_GROUP = 128

# MXFP4 scale rounding by torchao's names: what is added to the bits of a block's largest magnitude.
SCALE_ROUNDINGS = {
    "floor": 0,  # floor(log2 amax): the OCP rule
    "rceil": 0x3FFFFF,  # carries where the significand is above 1.5: ceil(log2(amax / 6)) + 2
    "ceil": 0x7FFFFF,  # carries where it is above 1: ceil(log2 amax)
    "even": 0x200000,  # carries from 1.75 on: amax is first rounded to E2M1's single mantissa bit
}

# Carries where the significand is above that of 448 = 1.75 * 2^8: ceil(log2(amax / 448)) + 8.
FP8_SCALE_ROUNDING = 0x1FFFFF


def mxfp4_exponents(amax: torch.Tensor, scale_rounding: str) -> torch.Tensor:
    """Exponents (int32, not clamped) of the scales of blocks, from ordered bits (`fp32.ordered`) of their maxima."""
    rounded = (amax + SCALE_ROUNDINGS[scale_rounding]) >> fp32.MANTISSA_BITS
    return rounded - (fp32.EXPONENT_BIAS + e2m1.E2M1_MAX_POW2)


def fp8_exponents(amax: torch.Tensor) -> torch.Tensor:
    """Exponents (int32, not clamped) of the scales of FP8 groups, from ordered bits of their maxima."""
    return ((amax + FP8_SCALE_ROUNDING) >> fp32.MANTISSA_BITS) - (fp32.EXPONENT_BIAS + e4m3.E4M3_MAX_POW2)
