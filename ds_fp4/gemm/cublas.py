# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Grouped GEMMs as one cuBLAS block-scaled GEMM per expert.

Activations have a scale per 1 x 128 and weights per 128 x 128; weight gradients have 1 x 128 on both sides. cuBLAS
reads the former with strides (1, rows), rows being those of the call, and the latter with their rows aligned to four
scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_fp4.formats import FP8_GROUP

from .backend import Backend, Pair
from .cublaslt import MIN_ALIGNMENT, SCALE_1X128, SCALE_128X128, CublasLt, ScaledMatmul
from .groups import Groups

# cuBLAS wants FP8 operands whose dimensions are multiples of 16 bytes.
ALIGNMENT = 16
SCALE_ALIGNMENT = 4


class CublasBackend(Backend):
    """cuBLAS block scaling, one call per expert."""

    name = "cublas"

    def __init__(self, device: torch.device) -> None:
        self._library = CublasLt()
        self._device = device
        self._matmuls: dict[tuple[int, torch.dtype], ScaledMatmul] = {}

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
        weight_scales, missing = b[1], -b[1].shape[2] % SCALE_ALIGNMENT
        if missing:  # padding by nothing would copy
            weight_scales = torch.nn.functional.pad(weight_scales, (0, missing))
        a_scales = [_with_rows_as_stride(scales) for scales in a[1].split(groups.sizes)]
        with self._matmul(SCALE_128X128, out.dtype).launches() as multiply:
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
        width, k = a[1].shape[0], b[1].shape[0]
        b_scales = _with_rows_as_stride(b[1])
        # A copy where an output is not the whole of a, one for all experts.
        scales_of = [_with_rows_as_stride(scales) for scales in a[1].split([out.shape[1] for out in outs])]
        with self._matmul(SCALE_1X128, outs[0].dtype).launches() as multiply:
            first = 0
            for out, a_scales in zip(outs, scales_of, strict=True):
                n, row = out.shape[1], 0
                for expert, size in enumerate(groups.sizes):
                    if size:
                        tile = row // FP8_GROUP
                        multiply(
                            _address(a[0], width * row + first * size),
                            _address(a_scales, tile * n),
                            _address(b[0], k * row),
                            _address(b_scales, tile * k),
                            _address(out, expert * n * k),
                            (n, k, size),
                        )
                    row += size
                first += n

    def _matmul(self, b_scaling: int, out_dtype: torch.dtype) -> ScaledMatmul:
        kind = (b_scaling, out_dtype)
        if kind not in self._matmuls:
            self._matmuls[kind] = ScaledMatmul(self._library, self._device, *kind)
        return self._matmuls[kind]


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
