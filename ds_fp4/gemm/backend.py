# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What every grouped-GEMM backend does, and the checks that they share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_fp4.formats import FP8_GROUP
from ds_fp4.formats.columns import block_scales, block_scales_size

from .groups import Groups

Pair = tuple[torch.Tensor, torch.Tensor]

OUT_DTYPES = (torch.bfloat16, torch.float32)


def groups_of(width: int) -> int:
    """Scales along `width` values."""
    return -(-width // FP8_GROUP)


def _check_pair(name: str, pair: Pair, shape: tuple[int, ...], scales: tuple[int, ...], device: torch.device) -> None:
    q, s = pair
    if q.dtype != torch.float8_e4m3fn or tuple(q.shape) != shape or q.device != device or not q.is_contiguous():
        raise ValueError(
            f"{name}'s codes must be contiguous float8_e4m3fn {list(shape)} on {device}, got {q.dtype} "
            f"{list(q.shape)} with strides {tuple(q.stride())} on {q.device}"
        )
    if s.dtype != torch.float32 or tuple(s.shape) != scales or s.device != device:
        raise ValueError(
            f"{name}'s scales must be float32 {list(scales)} on {device}, got {s.dtype} {list(s.shape)} on {s.device}"
        )


def _check_scale_strides(name: str, s: torch.Tensor) -> None:
    aligned = -(-s.shape[0] // 4) * 4
    wanted = ((s.shape[0], s.stride(0), 1), (s.shape[1], s.stride(1), aligned))
    if s.numel() and any(size > 1 and stride != expected for size, stride, expected in wanted):
        raise ValueError(
            f"{name}'s scales must have strides (1, {aligned}), as conversions write them with scale_layout='gemm', "
            f"got {tuple(s.stride())}"
        )


class Backend:
    """Grouped GEMMs of FP8 operands whose scales are powers of two, one way of computing them.

    A subclass defines `name`, `_grouped_gemm`, `_weight_gradient` and `check_shape`.

    Attributes:
        column_scale_layout: the `scale_layout` that `weight_gradient` is best given where a conversion has a choice:
            "gemm", or "blocks" of a backend that takes both.
    """

    name: str
    column_scale_layout = "gemm"

    def grouped_gemm(self, a: Pair, b: Pair, groups: Groups) -> torch.Tensor:
        """Each expert's rows times its weight: out[r] = a[r] @ b[expert of r]^T, summed in FP32, rounded once.

        Args:
            a: E4M3 [P, K], FP32 scales [P, ceil(K/128)] with strides (1, P).
            b: weights as `ops.weight_to_fp8` gives them: E4M3 [E, N, K], FP32 scales [E, ceil(N/128), ceil(K/128)].
            groups: of E experts, P rows in all.

        Returns:
            BF16 [P, N]; padding rows hold anything.

        Raises:
            ValueError: on a wrong shape, dtype, device or stride, or a shape that the library cannot do.
        """
        rows = groups.padded_rows
        if b[0].dim() != 3:
            raise ValueError(f"b's codes must be [experts, N, K], got {list(b[0].shape)}")
        experts, n, k = b[0].shape
        device = b[0].device
        groups.check(experts, device)
        _check_pair("a", a, (rows, k), (rows, groups_of(k)), device)
        _check_pair("b", b, (experts, n, k), (experts, groups_of(n), groups_of(k)), device)
        _check_scale_strides("a", a[1])
        if not b[1].is_contiguous():
            raise ValueError(f"b's scales must be contiguous, got strides {tuple(b[1].stride())}")
        self.check_shape("forward", n, k)
        out = torch.empty(rows, n, dtype=torch.bfloat16, device=device)
        if not k:  # libraries refuse an empty sum
            out.zero_()
        elif out.numel():
            self._grouped_gemm(a, b, groups, out)
        return out

    def weight_gradient(self, a: Pair, b: Pair, groups: Groups, outs: Sequence[torch.Tensor]) -> None:
        """Each expert's weight gradient: dW_e [N, K] = A_e @ B_e^T, summed over the expert's rows in FP32.

        Args:
            a: FP8 columns of the output gradient: E4M3 1-D [N*P], for each expert a row-major block [N, p_e]; FP32
                scales [N, P/128] with strides (1, align4(N)), or one for 128 columns in layout "blocks"
                (`formats.columns`). Padding must be zero codes with finite scales.
            b: FP8 columns of the input, the same with K for N. Scales in "blocks" are for backends whose
                `column_scale_layout` that is, and for one of the two operands at most.
            groups: of E experts, P rows in all.
            outs: contiguous BF16 or FP32 tensors [E, N_i, K] of one dtype, sum of N_i = N (w1 and w3, or w2 alone).
                Every element is written, zeros for an expert without rows. Where 128 columns of a share a scale, all
                N_i but the last are multiples of 128.

        Raises:
            ValueError: on a wrong shape, dtype, device or stride, or a shape that the library cannot do.
        """
        rows, experts = groups.padded_rows, len(groups.sizes)
        device = a[0].device
        n, k = self._check_outs(outs, experts, device)
        groups.check(experts, device)
        for name, pair, width, which in (("a", a, n, "N, the sum of N_i,"), ("b", b, k, "K")):
            if pair[0].numel() != width * rows:
                raise ValueError(
                    f"{name} must have {which} = {width} columns of {rows} rows, {width * rows} codes, for outs "
                    f"{[list(out.shape) for out in outs]}, got {pair[0].numel()}"
                )
            if pair[1].dim() == 1:
                if self.column_scale_layout != "blocks":
                    raise ValueError(
                        f"{name} has a scale for 128 columns, which {self.name} does not take: convert with "
                        f"scale_layout={self.column_scale_layout!r}"
                    )
                _check_pair(name, pair, (width * rows,), (block_scales_size(width, rows, experts),), device)
                if not pair[1].is_contiguous():
                    raise ValueError(f"{name}'s scales must be contiguous, got strides {tuple(pair[1].stride())}")
            else:
                _check_pair(name, pair, (width * rows,), (width, rows // FP8_GROUP), device)
                _check_scale_strides(name, pair[1])
        if a[1].dim() == 1:
            self._check_block_scales_of_a(b, outs)
        for out in outs:
            self.check_shape("weight_gradient", out.shape[1], k)
        for expert, size in enumerate(groups.sizes):
            if size == 0:
                for out in outs:
                    out[expert].zero_()
        if rows and n and k:
            self._weight_gradient(a, b, groups, outs)

    @staticmethod
    def _check_block_scales_of_a(b: Pair, outs: Sequence[torch.Tensor]) -> None:
        if b[1].dim() == 1:
            raise ValueError("one of a and b may have a scale for 128 columns, got both: convert one to layout 'gemm'")
        if any(out.shape[1] % FP8_GROUP for out in outs[:-1]):
            raise ValueError(
                f"where 128 columns of a share a scale, outs must divide them at multiples of {FP8_GROUP}, got "
                f"{[out.shape[1] for out in outs]}: convert a to layout 'gemm'"
            )

    @staticmethod
    def _check_outs(outs: Sequence[torch.Tensor], experts: int, device: torch.device) -> tuple[int, int]:
        """N, the sum of N_i, and K."""
        if not outs or any(out.dim() != 3 for out in outs):
            raise ValueError(f"outs must be tensors [experts, N_i, K], got {[list(out.shape) for out in outs]}")
        n, k = sum(out.shape[1] for out in outs), outs[0].shape[2]
        for out in outs:
            if (
                tuple(out.shape) != (experts, out.shape[1], k)
                or out.dtype not in OUT_DTYPES
                or out.dtype != outs[0].dtype
                or out.device != device
                or not out.is_contiguous()
            ):
                raise ValueError(
                    f"outs must be contiguous [{experts}, N_i, {k}] on {device}, all bfloat16 or all float32, got "
                    f"{out.dtype} {list(out.shape)} with strides {tuple(out.stride())} on {out.device}"
                )
        return n, k

    def check_shape(self, gemm: str, n: int, k: int) -> None:
        """ValueError if the library cannot do `gemm` ("forward" or "weight_gradient") with an N x K weight."""

    def describe(self) -> str:
        """For people: the library in use and its version."""
        raise NotImplementedError

    def _grouped_gemm(self, a: Pair, b: Pair, groups: Groups, out: torch.Tensor) -> None:
        """`grouped_gemm` of checked arguments that are not empty."""
        raise NotImplementedError

    def _weight_gradient(self, a: Pair, b: Pair, groups: Groups, outs: Sequence[torch.Tensor]) -> None:
        """`weight_gradient` of checked arguments with rows; zeros for experts without rows are written."""
        raise NotImplementedError


def try_out(backend: Backend, gemm: str, device: torch.device) -> None:
    """Run a tiny `gemm` and compare: a library may import and then fail in its calls, or misread scales.

    Raises:
        RuntimeError: if the result is wrong; whatever the library raises.
    """
    # Five scales along K, so that a layout aligned to four is seen; powers of two, so that every sum is exact.
    sizes, n, k = (128, 0, 256), 128, 640
    groups = Groups.of(sizes, device)
    rows, experts = groups.padded_rows, torch.arange(len(sizes), dtype=torch.float32)
    if gemm == "forward":
        tiles = 2.0 ** torch.arange(k // FP8_GROUP)
        a = _ones((rows, k), tiles.expand(rows, -1), device)
        b = _ones(
            (len(sizes), n, k), 2.0 ** -experts.view(-1, 1, 1) * tiles.expand(len(sizes), n // FP8_GROUP, -1), device
        )
        b = (b[0], b[1].contiguous())
        got = backend.grouped_gemm(a, b, groups)
        each = FP8_GROUP * float((tiles * tiles).sum()) * 2.0**-experts
        expected = each.repeat_interleave(torch.tensor(sizes))[:, None].expand(rows, n)
    else:
        tiles = 2.0 ** torch.arange(rows // FP8_GROUP)
        of_each = tiles.split([size // FP8_GROUP for size in sizes])
        a, b = (_ones((width * rows,), tiles.expand(width, -1), device) for width in (n, k))
        pairs = [(a, b)]
        if backend.column_scale_layout == "blocks":
            a_shared, b_shared = ((q, _shared(of_each, width, sizes, device)) for (q, _), width in ((a, n), (b, k)))
            pairs += [(a_shared, b), (a, b_shared)]
        got = torch.full((len(pairs), len(sizes), n, k), torch.nan, dtype=torch.bfloat16, device=device)
        for pair, out in zip(pairs, got, strict=True):
            backend.weight_gradient(*pair, groups, (out,))
        expected = torch.stack([FP8_GROUP * (part * part).sum() for part in of_each])[:, None, None].expand(got.shape)
    if not torch.equal(got.cpu().float(), expected.bfloat16().float()):
        raise RuntimeError(f"a {gemm} GEMM of ones gave wrong numbers")


def _ones(shape: tuple[int, ...], scales: torch.Tensor, device: torch.device) -> Pair:
    """Codes of 1, and scales with the strides of a GEMM operand."""
    codes = torch.ones(shape, device=device).to(torch.float8_e4m3fn)
    return codes, scales.to(device).transpose(-1, -2).contiguous().transpose(-1, -2)


def _shared(tiles: Sequence[torch.Tensor], width: int, sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """Scales in layout "blocks", each expert's the same for all columns; what lies between is NaN."""
    scales = torch.full((block_scales_size(width, sum(sizes), len(sizes)),), torch.nan)
    for block, values in zip(block_scales(scales, width, sizes), tiles, strict=True):
        block[:] = values
    return scales.to(device)
