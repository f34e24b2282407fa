# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Binary floating point formats, described once and applied exactly.

Every table of the reference is filled by `encode` and `decode` below. They work in FP64, where each value that occurs
(a short significand times a power of two between 2^-160 and 2^140) is a normal number, so that neither the device nor
its treatment of FP32 subnormals can change a bit.
"""

from typing import NamedTuple

import torch


class MiniFloat(NamedTuple):
    """A signed binary float: sign bit, exponent field, mantissa field, with gradual underflow.

    Attributes:
        bits: width of a code.
        mantissa_bits: width of the mantissa field.
        min_exponent: exponent of the smallest normal value; subnormals share it.
        max_code: code of the largest finite positive value; rounding saturates there.
        nan_code: the code that stands for NaN, None where the format has none.
    """

    bits: int
    mantissa_bits: int
    min_exponent: int
    max_code: int
    nan_code: int | None

    @property
    def sign_code(self) -> int:
        return 1 << (self.bits - 1)


BF16 = MiniFloat(bits=16, mantissa_bits=7, min_exponent=-126, max_code=0x7F7F, nan_code=0x7FC0)
FP16 = MiniFloat(bits=16, mantissa_bits=10, min_exponent=-14, max_code=0x7BFF, nan_code=0x7E00)
FP32 = MiniFloat(bits=32, mantissa_bits=23, min_exponent=-126, max_code=0x7F7FFFFF, nan_code=0x7FC00000)

OF_DTYPE = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as FP64 for integer exponents in [-1022, 1023], built from bits and so exact."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def encode(fmt: MiniFloat, value: torch.Tensor) -> torch.Tensor:
    """Codes (int64) of FP64 values: to nearest, ties to even, sign of zero kept, saturating at the largest value.

    An infinity saturates like any other value too large. NaN becomes `fmt.nan_code`.
    """
    magnitude = value.abs()
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(fmt.min_exponent, 1000)
    exponent = torch.where(magnitude == 0, fmt.min_exponent, exponent)
    steps = torch.round(magnitude / power_of_two(exponent - fmt.mantissa_bits)).nan_to_num(nan=0.0)
    # `steps` counts units in the last place; its implicit bit carries into the exponent field by plain addition.
    code = steps.to(torch.int64) + ((exponent.to(torch.int64) - fmt.min_exponent) << fmt.mantissa_bits)
    code = torch.where(torch.isinf(magnitude), fmt.max_code, code).clamp(max=fmt.max_code)
    code = code | torch.where(torch.signbit(value), fmt.sign_code, 0)
    if fmt.nan_code is None:
        return code
    return torch.where(torch.isnan(value), fmt.nan_code, code)


def decode(fmt: MiniFloat, code: torch.Tensor) -> torch.Tensor:
    """FP64 values of integer codes; a code past the largest finite one (either sign) is NaN."""
    code = code.to(torch.int64)
    magnitude = code & (fmt.sign_code - 1)
    field = magnitude >> fmt.mantissa_bits
    fraction = magnitude & ((1 << fmt.mantissa_bits) - 1)
    steps = torch.where(field > 0, fraction + (1 << fmt.mantissa_bits), fraction)
    exponent = fmt.min_exponent - fmt.mantissa_bits + (field - 1).clamp(min=0)
    value = steps.to(torch.float64) * power_of_two(exponent)
    value = torch.where(magnitude > fmt.max_code, torch.nan, value)
    return torch.where((code & fmt.sign_code) != 0, -value, value)
