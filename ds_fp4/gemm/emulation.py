# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Grouped GEMMs in plain PyTorch, for the CPU and as the judge of the others.

Operands are decoded to FP32, which is exact where scales are powers of two (and even TF32 would hold them), multiplied
and summed in FP32, and rounded once to the output's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ds_fp4.formats import FP8_GROUP, column_blocks

from .backend import Backend, Pair
from .groups import Groups


def decode(q: torch.Tensor, scales: torch.Tensor, block_rows: int = 1) -> torch.Tensor:
    """FP32 [M, K] of E4M3 [M, K] and one scale per `block_rows` x 128 block, short blocks at the ends."""
    if block_rows > 1:
        scales = scales.repeat_interleave(block_rows, 0)[: q.shape[0]]
    return q.to(torch.float32) * scales.repeat_interleave(FP8_GROUP, 1)[:, : q.shape[1]]


class EmulationBackend(Backend):
    """Plain PyTorch; any shape, any device."""

    name = "emulation"
    column_scale_layout = "blocks"

    def describe(self) -> str:
        return f"plain PyTorch {torch.__version__}, operands decoded to FP32"

    @torch.no_grad()
    def _grouped_gemm(self, a: Pair, b: Pair, groups: Groups, out: torch.Tensor) -> None:
        start = 0
        # Autocast would multiply and sum in its own dtype.
        with torch.autocast(out.device.type, enabled=False):
            for expert, size in enumerate(groups.sizes):
                if size:
                    rows = slice(start, start + size)
                    weight = decode(b[0][expert], b[1][expert], FP8_GROUP)
                    out[rows] = decode(a[0][rows], a[1][rows]) @ weight.t()
                start += size

    @torch.no_grad()
    def _weight_gradient(self, a: Pair, b: Pair, groups: Groups, outs: Sequence[torch.Tensor]) -> None:
        widths, k = [out.shape[1] for out in outs], outs[0].shape[2]
        blocks = zip(_decoded_columns(a, groups, sum(widths)), _decoded_columns(b, groups, k), strict=True)
        for expert, (left, right) in enumerate(blocks):
            if groups.sizes[expert]:
                with torch.autocast(a[0].device.type, enabled=False):
                    gradient = left @ right.t()
                for out, part in zip(outs, gradient.split(widths), strict=True):
                    out[expert] = part


def _decoded_columns(pair: Pair, groups: Groups, width: int) -> Iterator[torch.Tensor]:
    """FP32 [width, p_e] of each expert."""
    columns_of_a_scale = FP8_GROUP if pair[1].dim() == 1 else 1
    for q, scales in column_blocks(*pair, groups.sizes, width):
        yield decode(q, scales, columns_of_a_scale)
