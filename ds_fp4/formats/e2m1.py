# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""E2M1, the 4-bit element of MXFP4 (OCP MX specification 1.0, section 5.3.3): 0, 0.5, 1, 1.5, 2, 3, 4, 6 and -0 to -6.

Two codes share a byte, the even index in the low nibble, as in `torch.float4_e2m1fn_x2`.
"""

import torch

from . import fp32
from .minifloat import MiniFloat, decode

E2M1 = MiniFloat(bits=4, mantissa_bits=1, min_exponent=0, max_code=0x7, nan_code=None)
E2M1_MAX_POW2 = 2  # exponent of the largest value, 6
E2M1_SIGN = 0x8

_DROPPED_BITS = fp32.MANTISSA_BITS - E2M1.mantissa_bits
_ONE_BITS = fp32.EXPONENT_BIAS << fp32.MANTISSA_BITS
_EIGHTH_BITS = (fp32.EXPONENT_BIAS - 3) << fp32.MANTISSA_BITS
# Adding 2^22 to v in [0, 1] leaves 2v, rounded to nearest even, in the low bits: FP32 numbers there are 0.5 apart.
_HALF_STEPS = 2.0**22
_HALF_STEPS_BITS = (fp32.EXPONENT_BIAS + 22) << fp32.MANTISSA_BITS


def encode_scaled(scaled: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """E2M1 codes (uint8, one a byte) of values given by the bits of their magnitude and by their sign.

    To nearest, ties to even, saturating at 6.

    Args:
        scaled: int32, ordered bits (`fp32.scale`) of the scaled magnitudes.
        bits: int32, same shape, whose top bit is the sign.
    """
    below_one = scaled.clamp(_EIGHTH_BITS, _ONE_BITS).view(torch.float32).add_(_HALF_STEPS).view(torch.int32)
    below_one -= _HALF_STEPS_BITS
    # From 1 on the code is the top of the bit pattern. Below 1 this falls short of `below_one`, which from 1 on is 2:
    # the larger of the two is right everywhere.
    from_one = (scaled >> _DROPPED_BITS).bitwise_and_(1)
    from_one += scaled
    from_one += (1 << (_DROPPED_BITS - 1)) - 1
    from_one >>= _DROPPED_BITS
    from_one -= (fp32.EXPONENT_BIAS - 1) << E2M1.mantissa_bits
    code = torch.maximum(below_one, from_one, out=from_one).clamp_(max=E2M1.max_code)
    code |= (bits >> 28).bitwise_and_(E2M1_SIGN)
    return code.to(torch.uint8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 2] of codes (uint8 [..., K], contiguous), the even index in the low nibble."""
    # Flat, because a single row is contiguous whatever its row stride, and an odd one cannot be viewed in pairs.
    pairs = codes.view(-1).view(torch.int16)  # little endian: the even code is the low byte
    return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8).view(*codes.shape[:-1], codes.shape[-1] // 2)


def byte_values() -> torch.Tensor:
    """FP64 [256, 2]: the two values in each packed byte."""
    byte = torch.arange(256, dtype=torch.int64, device="cpu")
    return torch.stack([decode(E2M1, byte & 0xF), decode(E2M1, byte >> 4)], dim=-1)
