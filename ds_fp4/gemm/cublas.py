# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Grouped GEMMs as one cuBLAS block-scaled GEMM per expert.

Activations have a scale per 1 x 128 and weights per 128 x 128; of a weight gradient's operands one has a scale per
128 x 128 where it can, since cuBLAS is faster then. It reads scales per 1 x 128 with strides (1, rows), rows being
those of the call, and scales per 128 x 128 with their rows aligned to four.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ds_fp4.formats import FP8_GROUP
from ds_fp4.formats.columns import BLOCK_SCALE_ALIGNMENT, block_scale_columns, block_scale_stride

from .backend import Backend, Pair, groups_of
from .cublaslt import MIN_ALIGNMENT, SCALE_1X128, SCALE_128X128, CublasLt, ScaledMatmul
from .groups import Groups

# cuBLAS wants FP8 operands whose dimensions are multiples of 16 bytes.
ALIGNMENT = 16
FP32_BYTES = 4


class CublasBackend(Backend):
    """cuBLAS block scaling, one call per expert."""

    name = "cublas"
    column_scale_layout = "blocks"

    def __init__(self, device: torch.device) -> None:
        self._library = CublasLt()
        self._device = device
        self._matmuls: dict[tuple[int, int, torch.dtype], ScaledMatmul] = {}

    def describe(self) -> str:
        return (
            f"cuBLASLt {self._library.version} of torch {torch.__version__} with CUDA {torch.version.cuda}, a "
            "block-scaled GEMM per expert"
        )

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
        _, n, k = b[0].shape
        weight_scales, missing = b[1], -b[1].shape[2] % BLOCK_SCALE_ALIGNMENT
        if missing:  # padding by nothing would copy
            weight_scales = torch.nn.functional.pad(weight_scales, (0, missing))
        a_scales = [_with_rows_as_stride(scales) for scales in a[1].split(groups.sizes)]
        with self._matmul(SCALE_1X128, SCALE_128X128, out.dtype).launches() as multiply:
            row = 0
            for expert, size in enumerate(groups.sizes):
                if size:
                    multiply(
                        _address(a[0], row * k),
                        _address(a_scales[expert]),
                        _address(b[0], expert * n * k),
                        _address(weight_scales, expert * weight_scales.stride(0)),
                        _address(out, row * n),
                        (size, n, k),
                    )
                row += size

    @torch.no_grad()
    def _weight_gradient(self, a: Pair, b: Pair, groups: Groups, outs: Sequence[torch.Tensor]) -> None:
        widths, k = [out.shape[1] for out in outs], outs[0].shape[2]
        *firsts, width = itertools.accumulate(widths, initial=0)
        *starts, _ = itertools.accumulate(groups.sizes, initial=0)
        busy = [(e, row, size) for e, (row, size) in enumerate(zip(starts, groups.sizes, strict=True)) if size]
        # Before the first launch, since they may be copies, and kept until the last.
        scales_of_b = _ColumnScales(b[1], 0, k, k)
        scales_of_a = [_ColumnScales(a[1], first, n, width) for first, n in zip(firsts, widths, strict=True)]
        a_codes, b_codes = _address(a[0]), _address(b[0])
        with self._matmul(scales_of_a[0].kind, scales_of_b.kind, outs[0].dtype).launches() as multiply:
            for out, n, first, scales in zip(outs, widths, firsts, scales_of_a, strict=True):
                gradient, gradient_bytes = _address(out), n * k * out.element_size()
                for expert, row, size in busy:
                    multiply(
                        a_codes + width * row + first * size,
                        scales.address(expert, row, size),
                        b_codes + k * row,
                        scales_of_b.address(expert, row, size),
                        gradient + expert * gradient_bytes,
                        (n, k, size),
                    )

    def _matmul(self, a_scaling: int, b_scaling: int, out_dtype: torch.dtype) -> ScaledMatmul:
        kind = (a_scaling, b_scaling, out_dtype)
        if kind not in self._matmuls:
            self._matmuls[kind] = ScaledMatmul(self._library, self._device, *kind)
        return self._matmuls[kind]


class _ColumnScales:
    """Scales of columns `first` to `first + width` of an operand with `columns` of them, as cuBLAS reads them.

    Attributes:
        kind: SCALE_1X128 or SCALE_128X128.
    """

    def __init__(self, scales: torch.Tensor, first: int, width: int, columns: int) -> None:
        self._width, self._blocks = width, groups_of(columns)
        self.kind = SCALE_1X128 if scales.dim() == 2 else SCALE_128X128
        if self.kind == SCALE_1X128:
            # A copy where these are not all columns, one for all experts.
            scales, first = _with_rows_as_stride(scales[first : first + width]), 0
        self._scales, self._base, self._first_block = scales, _address(scales), first // FP8_GROUP

    def address(self, expert: int, row: int, size: int) -> int:
        """Where those of the expert with `size` rows from `row` on begin."""
        tile, tiles = row // FP8_GROUP, size // FP8_GROUP
        if self.kind == SCALE_1X128:
            value = tile * self._width
        else:
            value = self._blocks * block_scale_columns(tile, expert) + self._first_block * block_scale_stride(tiles)
        return self._base + value * FP32_BYTES


def _address(t: torch.Tensor, offset: int = 0) -> int:
    """Of the value `offset` after the tensor's first."""
    return t.data_ptr() + offset * t.element_size()


def _with_rows_as_stride(scales: torch.Tensor) -> torch.Tensor:
    """Scales [rows, tiles] with strides exactly (1, rows), aligned; a copy only if the values lie elsewhere."""
    rows = scales.shape[0]
    if scales.stride() == (1, rows) and scales.data_ptr() % MIN_ALIGNMENT == 0:
        return scales
    values = scales.t().contiguous()
    if values.data_ptr() % MIN_ALIGNMENT:
        values = values.clone()
    return values.as_strided(scales.shape, (1, rows))
