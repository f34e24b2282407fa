# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""FP32 bit patterns of input values, where the quantizers take exponents and round.

`ordered` bits extend FP32's normal encoding below its smallest exponent: bits >> 23 minus 127 is floor(log2 |v|) for
every value, subnormals included, and the low 23 bits are its mantissa. Scaling by a power of two is an integer
addition.
"""

import torch

EXPONENT_BIAS = 127
MANTISSA_BITS = 23
MAGNITUDE_MASK = 0x7FFFFFFF
MIN_NORMAL_BITS = 0x00800000
INFINITY_BITS = 0x7F800000

# From this exponent on, |subnormal| * 2^-exponent < 2^-10.
_SUBNORMALS_MATTER_BELOW = -116

# What zero becomes in ordered bits: below the smallest subnormal, 2^-149, whose bits are -22 << 23.
_ORDERED_ZERO = -23 << MANTISSA_BITS


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """FP32 bits (int32) of a BF16, FP16 or FP32 tensor; exact, whatever the device does with subnormals."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    # FP16 subnormals are normal in FP32.
    return x.to(torch.float32).view(torch.int32)


def ordered(magnitude: torch.Tensor) -> torch.Tensor:
    """Ordered bits of FP32 magnitude bits (int32, sign cleared)."""
    # A subnormal is mantissa * 2^-149, and an integer below 2^23 converts to a normal FP32 number.
    subnormal = magnitude.clamp(max=MIN_NORMAL_BITS).to(torch.float32).view(torch.int32) - (149 << MANTISSA_BITS)
    return torch.where(magnitude < MIN_NORMAL_BITS, subnormal.clamp(min=_ORDERED_ZERO), magnitude)


def scale(magnitude: torch.Tensor, amax: torch.Tensor, exponent: torch.Tensor, block: int) -> torch.Tensor:
    """Bits of |x| * 2^-exponent for blocks along the last axis, in place of `magnitude` where possible.

    Args:
        magnitude: int32 [M, K], FP32 magnitude bits. Overwritten.
        amax: int32 [M, K / block], the largest of each block.
        exponent: int32 [M, K / block], in [-127, 127].
        block: values that share an exponent.

    Returns:
        int32 [M, K]: ordered bits of the scaled magnitudes. Of a result under 2^-10, which rounds to zero in E2M1 and
        E4M3 alike, no more than that is right.
    """
    m, k = magnitude.shape
    exponent = exponent.masked_fill(amax == 0, 0)  # zero blocks stay zero under any; this one needs no care
    # A subnormal is under 2^-126: it rounds to zero, whatever its bits mean, unless the block's exponent is this low.
    # On the host a look saves time; on a GPU looking would mean waiting for it.
    if magnitude.is_cuda or bool((exponent < _SUBNORMALS_MATTER_BELOW).any()):
        magnitude = ordered(magnitude)
    magnitude.view(m, k // block, block).sub_((exponent << MANTISSA_BITS)[..., None])
    return magnitude
