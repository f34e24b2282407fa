# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""A second definition of the formats, written from their tables: the reference must not be tested with itself.

Everything is numpy in FP64, which holds all values exactly; a rounding is an exhaustive search for the nearest entry
of the code table, a scale is the outcome of trying exponents. Slow, and with nothing in common with ds_fp4.formats.
"""

import math

import numpy as np
import torch

E2M1_TABLE = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3_TABLE = np.array(
    [math.ldexp(f, -9) for f in range(8)]
    + [math.ldexp(8 + f, e - 10) for e in range(1, 16) for f in range(8) if (e, f) != (15, 7)]
)
E4M3_NAN = 0x7F
NAN_BYTE = 0xFF


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """FP64 array of a float tensor, subnormals and NaN included."""
    return x.detach().to(torch.float64).numpy()


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Codes: index of the entry nearest to |value|, of two equally near the even one, with the sign bit on top."""
    magnitude = np.abs(values)
    distance = np.abs(magnitude[..., None] - table)
    best = distance.min(-1, keepdims=True)
    tied = distance == best
    even = np.arange(len(table)) % 2 == 0
    choice = np.where(tied.sum(-1) > 1, np.argmax(tied & even, -1), np.argmax(tied, -1))
    sign = 8 if len(table) == 8 else 128
    return np.where(np.signbit(values), choice + sign, choice).astype(np.uint8)


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    table = np.append(E4M3_TABLE, np.nan)
    return np.where(codes >= 128, -1.0, 1.0) * table[codes & 0x7F]


def e2m1_values(packed: np.ndarray) -> np.ndarray:
    """FP64 [M, 2 * width] of packed bytes."""
    codes = np.stack([packed & 0xF, packed >> 4], -1).reshape(packed.shape[0], 2 * packed.shape[1])
    return np.where(codes >= 8, -1.0, 1.0) * E2M1_TABLE[codes & 7]


def mxfp4_exponent(amax: float, mode: str) -> int:
    """Scale exponent of a block of finite values, by the words of each rule; clamped to what UE8M0 holds."""
    if amax == 0.0:
        return -127
    floor = math.frexp(amax)[1] - 1
    if mode == "floor":
        exponent = floor - 2
    elif mode == "ceil":
        exponent = (floor if math.ldexp(1.0, floor) == amax else floor + 1) - 2
    elif mode == "rceil":
        exponent = next(e for e in range(floor - 4, floor + 2) if math.ldexp(6.0, e) >= amax)
    else:  # even: amax to the nearest number of two significant bits, then floor
        halves = np.round(math.ldexp(amax, -floor) * 2)  # numpy rounds ties to even
        exponent = floor + (1 if halves == 4 else 0) - 2
    return min(max(exponent, -127), 127)


def fp8_exponent(amax: float) -> int:
    if amax == 0.0:
        return -127
    floor = math.frexp(amax)[1] - 1
    return max(next(e for e in range(floor - 10, floor) if math.ldexp(448.0, e) >= amax), -127)


def quantize_mxfp4(x: np.ndarray, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes [M, K/2] and scale bytes [M, K/32] of FP64 [M, K]."""
    m, k = x.shape
    blocks = x.reshape(m, k // 32, 32)
    scales = np.zeros((m, k // 32), np.uint8)
    codes = np.zeros(blocks.shape, np.uint8)
    for i in range(m):
        for b in range(k // 32):
            block = blocks[i, b]
            if not np.isfinite(block).all():
                scales[i, b] = NAN_BYTE
                continue
            exponent = mxfp4_exponent(np.abs(block).max(), mode)
            scales[i, b] = exponent + 127
            codes[i, b] = nearest(np.ldexp(block, -exponent), E2M1_TABLE)
    codes = codes.reshape(m, k)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def quantize_fp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [M, K] and scale exponents [M, ceil(K/128)] of FP64 [M, K]."""
    m, k = x.shape
    groups = -(-k // 128)
    codes, exponents = np.zeros((m, k), np.uint8), np.zeros((m, groups), np.int64)
    for i in range(m):
        for g in range(groups):
            part = slice(128 * g, min(128 * (g + 1), k))
            group = x[i, part]
            if not np.isfinite(group).all():
                codes[i, part], exponents[i, g] = E4M3_NAN, -127
                continue
            exponents[i, g] = fp8_exponent(np.abs(group).max())
            codes[i, part] = nearest(np.ldexp(group, -exponents[i, g]), E4M3_TABLE)
    return codes, exponents


def scale_values(scales: torch.Tensor) -> np.ndarray:
    """FP64 scales of UE8M0 bytes or FP32."""
    if scales.dtype == torch.float32:
        values = to_numpy(scales)
        return np.where(np.isinf(values), np.nan, values)
    byte = scales.numpy().astype(np.int64)
    return np.where(byte == NAN_BYTE, np.nan, np.ldexp(1.0, byte - 127))


def decoded_fp4(packed: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    return e2m1_values(packed.numpy()) * np.repeat(scale_values(scales), 32, 1)


def decoded_fp8(q: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    codes = q.view(torch.uint8).numpy()
    return e4m3_values(codes) * np.repeat(scale_values(scales), 128, 1)[:, : codes.shape[1]]


_FLOATS = {torch.bfloat16: (7, -126), torch.float16: (10, -14), torch.float32: (23, -126)}


def round_to_dtype(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """FP64 values rounded to `dtype` (to nearest, ties to even), saturating at its largest value."""
    mantissa, lowest = _FLOATS[dtype]
    finite = np.where(np.isfinite(values), values, 0.0)
    step = np.maximum(np.frexp(finite)[1] - 1, lowest) - mantissa
    rounded = np.ldexp(np.round(np.ldexp(finite, -step)), step)
    largest = torch.finfo(dtype).max
    rounded = np.copysign(np.clip(rounded, -largest, largest), values)
    return np.where(np.isfinite(values), rounded, values)


def same_values(tensor: torch.Tensor, expected: np.ndarray) -> bool:
    """Equal in value, sign of zero and places of NaN (any NaN will do)."""
    got = to_numpy(tensor)
    nan = np.isnan(expected)
    if not np.array_equal(np.isnan(got), nan):
        return False
    got, expected = np.where(nan, 0.0, got), np.where(nan, 0.0, expected)
    return np.array_equal(got, expected) and np.array_equal(np.signbit(got), np.signbit(expected))
