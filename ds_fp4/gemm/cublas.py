# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Grouped GEMMs as one cuBLAS block-scaled GEMM per expert, through torch.

Activations have a scale per 1 x 128 and weights per 128 x 128; weight gradients have 1 x 128 on both sides. cuBLAS
reads the former with strides (1, rows), rows being those of the call, and the latter with their rows aligned to four
scales. torch's older call, `_scaled_mm`, guesses the kind of scaling from shapes and does not know of the alignment:
its numbers are wrong where K/128 is not a multiple of four. `_scaled_mm_v2`, which `torch.nn.functional.scaled_mm`
wraps, is told both, and its overload with `out` writes in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import ScalingType

from ds_fp4.formats import FP8_GROUP

from .backend import Backend, Pair, expert_columns
from .groups import Groups

# cuBLAS wants FP8 operands whose dimensions are multiples of 16 bytes.
ALIGNMENT = 16
SCALE_ALIGNMENT = 4


class CublasBackend(Backend):
    """cuBLAS block scaling, one call per expert."""

    name = "cublas"

    def __init__(self, device: torch.device) -> None:
        if torch.version.cuda is None:
            raise RuntimeError(f"torch {torch.__version__} is built without CUDA")

    def describe(self) -> str:
        return f"torch {torch.__version__} with CUDA {torch.version.cuda}, a block-scaled GEMM per expert"

    def check_shape(self, gemm: str, n: int, k: int) -> None:
        # The summed dimension of a weight gradient is rows, which are padded to 128.
        wanted = {"N": (n, ALIGNMENT), "K": (k, FP8_GROUP if gemm == "forward" else ALIGNMENT)}
        for name, (width, multiple) in wanted.items():
            if width % multiple:
                raise ValueError(
                    f"cuBLAS block scaling needs {name} to be a multiple of {multiple} in a {gemm} GEMM, got {width}; "
                    "the emulation backend takes any"
                )

    @torch.no_grad()
    def _grouped_gemm(self, a: Pair, b: Pair, groups: Groups, out: torch.Tensor) -> None:
        weight_scales = torch.nn.functional.pad(b[1], (0, -b[1].shape[2] % SCALE_ALIGNMENT))
        start = 0
        for expert, size in enumerate(groups.sizes):
            if size:
                rows = slice(start, start + size)
                scales = _with_rows_as_stride(a[1][rows])
                _multiply(a[0][rows], scales, b[0][expert], weight_scales[expert].t(), _BLOCK_128X128, out[rows])
            start += size

    @torch.no_grad()
    def _weight_gradient(self, a: Pair, b: Pair, groups: Groups, outs: Sequence[torch.Tensor]) -> None:
        right_blocks = expert_columns((b[0], _with_rows_as_stride(b[1])), groups)
        start = 0
        for out in outs:
            rows = slice(start, start + out.shape[1])
            # One copy for all experts, where `out` is not the whole of a; blocks of tiles are views of it.
            scales = _with_rows_as_stride(a[1][rows])
            for left, right in zip(expert_columns(a, groups), right_blocks, strict=True):
                tiles = slice(left.first_tile, left.first_tile + left.scales.shape[1])
                _multiply(
                    left.q[rows],
                    _with_rows_as_stride(scales[:, tiles]),
                    right.q,
                    _with_rows_as_stride(right.scales),
                    _BLOCK_1X128,
                    out[left.expert],
                )
            start = rows.stop


_scaled_mm = torch.ops.aten._scaled_mm_v2.out
_BLOCK_1X128 = ScalingType.BlockWise1x128.value
_BLOCK_128X128 = ScalingType.BlockWise128x128.value


def _with_rows_as_stride(scales: torch.Tensor) -> torch.Tensor:
    """Scales [rows, tiles] with strides exactly (1, rows), as torch demands even of a single tile; a copy only if the
    values lie elsewhere."""
    rows = scales.shape[0]
    if scales.stride() == (1, rows):
        return scales
    return scales.t().contiguous().as_strided(scales.shape, (1, rows))


def _multiply(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    b_scaling: int,
    out: torch.Tensor,
) -> None:
    """out [M, N] = a [M, K] @ b [N, K]^T with 1 x 128 scales of a; sums are FP32 throughout."""
    _scaled_mm(
        a, b.t(), [a_scales], [_BLOCK_1X128], [], [b_scales], [b_scaling], [], None, out.dtype, [], False, out=out
    )
