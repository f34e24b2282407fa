# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""E4M3, the 8-bit element of the FP8 format (`torch.float8_e4m3fn`): largest 448, no infinities, NaN 0x7F and 0xFF."""

import torch

from . import fp32
from .minifloat import MiniFloat, decode

E4M3 = MiniFloat(bits=8, mantissa_bits=3, min_exponent=-6, max_code=0x7E, nan_code=0x7F)
E4M3_MAX_POW2 = 8  # exponent of the largest value, 448
E4M3_NAN = 0x7F
E4M3_MAGNITUDE = 0x7F

CODE_DTYPES = (torch.float8_e4m3fn, torch.uint8)

# 2^-11 rounds to zero as zero does, and is a normal FP32 number.
_TINY_BITS = (fp32.EXPONENT_BIAS - 11) << fp32.MANTISSA_BITS
_MAX_BITS = 0x43E00000  # 448.0


def encode_scaled(scaled: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """E4M3 codes (uint8) of values given by the bits of their magnitude and by their sign.

    To nearest, ties to even, saturating at 448; never NaN.

    Args:
        scaled: int32, ordered bits (`fp32.scale`) of the scaled magnitudes.
        bits: int32, same shape, whose top bit is the sign.
    """
    # Within these bounds torch's own cast follows the rule on every device and version (the tests go through all of
    # its rounding boundaries): versions differ in overflow, devices in subnormals, and neither occurs.
    bounded = scaled.clamp(_TINY_BITS, _MAX_BITS)
    bounded |= bits & ~fp32.MAGNITUDE_MASK
    return bounded.view(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)


def code_values() -> torch.Tensor:
    """FP64 [256]: the value of each code."""
    return decode(E4M3, torch.arange(256, dtype=torch.int64, device="cpu"))
