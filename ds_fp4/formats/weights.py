# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Expert weights as FP8 GEMM operands, and their gradients on the way back.

Weights have one scale per block of 128 x 128, so that W and its transpose have the same codes: what the forward pass
multiplies by is, value for value, what the data gradient is multiplied by. Scales are powers of two like all others
here (GEMM libraries take any FP32). E4M3 is a floating point format, where a factor below two hardly matters: Gaussian
weights come to 31.5 dB of signal to noise with powers of two and 31.6 with amax / 448, uniform ones to 32.5 and 31.9,
Student-t(3) ones to 31.9 and 32.7.
"""

import torch

from . import checks, e4m3, fp32, rows, ue8m0
from .blocks import fp8_exponents
from .checks import Pair

BLOCK = 128


def _blocks(t: torch.Tensor) -> torch.Tensor:
    """[N, K] int32 as [N/128, 128, K/128, 128], padded with zeros."""
    n, k = t.shape
    t = torch.nn.functional.pad(t, (0, -k % BLOCK, 0, -n % BLOCK))
    return t.view(t.shape[0] // BLOCK, BLOCK, t.shape[1] // BLOCK, BLOCK)


@torch.no_grad()
def weight_to_fp8(
    w1: torch.Tensor,
    w3: torch.Tensor | None = None,
    *,
    orientation: str = "both",
    out: tuple[Pair | None, Pair | None] | None = None,
) -> tuple[Pair | None, Pair | None]:
    """Quantize expert weights to FP8 in blocks of 128 x 128, as they are, transposed, or both from one read.

    The scale of a block is 2^ceil(log2(amax / 448)), not below 2^-126 (GEMM libraries take subnormal numbers for
    zeros); a value is divided by it and rounded to nearest, ties to even. A block that holds a NaN or an infinity gets
    2^-126 and NaN codes (0x7F) throughout.

    Args:
        w1: BF16, FP16 or FP32 [E, I, K], inner stride 1, any other strides.
        w3: None, or as w1. Its rows follow w1's in each expert: N = 2I rows, a gate and an up projection in one
            operand. Without it N = I.
        orientation: what is wanted: "rows" (q and scales), "transposed" (q_t and scales_t) or "both".
        out: ((q, scales), (q_t, scales_t)) to write to and return, contiguous, codes as float8_e4m3fn or uint8; None
            in place of the pair that is not wanted.

    Returns:
        (q float8_e4m3fn [E, N, K], scales float32 [E, ceil(N/128), ceil(K/128)]), and
        (q_t float8_e4m3fn [E, K, N], scales_t float32 [E, ceil(K/128), ceil(N/128)]); None in place of the pair that
        is not wanted.

    Raises:
        ValueError: on an unknown orientation, a wrong shape, dtype, device or stride.
    """
    as_they_are, transposed = result = checks.prepare_weight_to_fp8(w1, w3, orientation, out)
    n, k = w1.shape[1] * (1 if w3 is None else 2), w1.shape[2]
    for expert in range(w1.shape[0]):
        weight = w1[expert] if w3 is None else torch.cat([w1[expert], w3[expert]])
        # Whole bands of blocks, so that temporary memory does not grow with the weight.
        for band in rows.pieces(n, k, w1.device, multiple=BLOCK):
            bits = _blocks(fp32.bits_of(weight[band]))
            magnitude = bits & fp32.MAGNITUDE_MASK
            amax = magnitude.amax((1, 3))
            finite = amax < fp32.INFINITY_BITS
            exponent = fp8_exponents(fp32.ordered(amax)).masked_fill_(~finite, ue8m0.UE8M0_MIN_EXPONENT)
            exponent.clamp_(min=ue8m0.FP32_MIN_NORMAL_EXPONENT)
            amax, spread = (
                t[:, None, :].expand(-1, BLOCK, -1).reshape(-1, exponent.shape[1]) for t in (amax, exponent)
            )
            scaled = fp32.scale(magnitude.view(spread.shape[0], -1), amax, spread, BLOCK)
            codes = e4m3.encode_scaled(scaled, bits.view(scaled.shape)).view(bits.shape)
            codes.masked_fill_(~finite[:, None, :, None], e4m3.E4M3_NAN)
            codes = codes.view(scaled.shape)[: band.stop - band.start, :k]
            blocks = slice(band.start // BLOCK, -(-band.stop // BLOCK))
            if as_they_are is not None:
                q, scales = as_they_are
                q.view(torch.uint8)[expert, band] = codes
                ue8m0.store(exponent, scales[expert, blocks])
            if transposed is not None:
                q_t, scales_t = transposed
                q_t.view(torch.uint8)[expert, :, band] = codes.t()
                ue8m0.store(exponent.t(), scales_t[expert, :, blocks])
    return result


@torch.no_grad()
def split_weight_gradient(
    gradient: torch.Tensor, *, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The FP32 gradient of both projections that `weight_to_fp8` joined, as BF16 gradients of each.

    Rounded to nearest, ties to even; what is too large becomes infinite, as in torch.

    Args:
        gradient: FP32 [E, 2I, K], contiguous.
        out: (g1, g3) to write to and return, contiguous.

    Returns:
        g1, g3: BF16 [E, I, K].

    Raises:
        ValueError: on a wrong shape, dtype, device or stride.
    """
    g1, g3 = checks.prepare_split_weight_gradient(gradient, out)
    half = g1.shape[1]
    g1.copy_(gradient[:, :half])
    g3.copy_(gradient[:, half:])
    return g1, g3
