# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Formats in plain PyTorch: the specification that the CUDA kernels are tested against, bit for bit.

One place for each rule: `e2m1`, `e4m3`, `ue8m0` (codes and scales), `blocks` (which scale), `mxfp4`, `fp8` (rows),
`convert` (from one format to another without a wider type in between), `columns` (the layout of weight-gradient
operands), `row_and_col` (both of one tensor), `weights`, `checks` (arguments). `ds_fp4.ops` exports the same calls,
with kernels for CUDA tensors. docs/formats.md says it in words.
"""

from .blocks import FP8_GROUP, MXFP4_BLOCK, SCALE_ROUNDINGS
from .checks import ORIENTATIONS, align_to_gemm
from .columns import ColumnLayout, block_scales, column_blocks, padded_sizes
from .convert import (
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    fp8_row_to_fp4_row,
    fp8_row_to_fp8_col,
    fp8_row_to_fp8_row,
)
from .fp8 import bf16_to_fp8_row, fp8_row_to_bf16
from .mxfp4 import bf16_to_fp4_row, fp4_row_to_bf16
from .row_and_col import bf16_to_fp8_row_and_col
from .weights import split_weight_gradient, weight_to_fp8

__all__ = [
    "ColumnLayout",
    "align_to_gemm",
    "FP8_GROUP",
    "MXFP4_BLOCK",
    "ORIENTATIONS",
    "SCALE_ROUNDINGS",
    "bf16_to_fp4_row",
    "bf16_to_fp8_row",
    "bf16_to_fp8_row_and_col",
    "block_scales",
    "column_blocks",
    "fp4_row_to_bf16",
    "fp4_row_to_fp8_col",
    "fp4_row_to_fp8_row",
    "fp8_row_to_bf16",
    "fp8_row_to_fp4_row",
    "fp8_row_to_fp8_col",
    "fp8_row_to_fp8_row",
    "padded_sizes",
    "split_weight_gradient",
    "weight_to_fp8",
]
