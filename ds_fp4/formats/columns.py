# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Geometry of the FP8 column layout, the K-major operand of weight-gradient GEMMs.

Rows (tokens) come in groups, one per expert, of m_e rows each; in the output every group is padded to p_e = the next
multiple of 128. `q` is one-dimensional: for each group in turn a row-major block [K, p_e], so that one column's
tokens lie side by side. `scales` is [K, sum(p_e) / 128]: one scale per column per tile of 128 rows, tiles of all
groups in order.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from .blocks import FP8_GROUP

TILE_ROWS = FP8_GROUP


def padded_sizes(group_sizes: Iterable[int]) -> list[int]:
    """Each group's size rounded up to a multiple of 128; an empty group stays empty."""
    return [-(-size // TILE_ROWS) * TILE_ROWS for size in group_sizes]


def padded(group_sizes: torch.Tensor) -> torch.Tensor:
    """`padded_sizes` of an int32 tensor."""
    return (group_sizes + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS


def column_blocks(
    q: torch.Tensor, scales: torch.Tensor, group_sizes: Iterable[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the column layout, one (q [K, p_e], scales [K, p_e / 128]) a group. `group_sizes` are host integers."""
    k = scales.shape[0]
    blocks, start = [], 0
    for size in padded_sizes(group_sizes):
        block = q[k * start : k * (start + size)].view(k, size)
        blocks.append((block, scales[:, start // TILE_ROWS : (start + size) // TILE_ROWS]))
        start += size
    return blocks


class ColumnLayout(NamedTuple):
    """Where the rows of each group lie, as tensors on the device of `group_sizes`.

    Attributes:
        group_sizes: int32 [E], m_e.
        row_offsets: int32 [E], first input row of each group.
        padded_offsets: int32 [E], first padded row of each group; a multiple of 128.
        padded_sizes: int32 [E], p_e.
        padded_rows: their sum, a host integer.
    """

    group_sizes: torch.Tensor
    row_offsets: torch.Tensor
    padded_offsets: torch.Tensor
    padded_sizes: torch.Tensor
    padded_rows: int

    @classmethod
    def of(cls, group_sizes: torch.Tensor, padded_rows: int | None = None) -> "ColumnLayout":
        """Layout of int32 [E] `group_sizes`. Without `padded_rows` a GPU is waited for, to learn the sum."""
        sizes = padded(group_sizes)
        if padded_rows is None:
            padded_rows = int(sizes.sum())
        row_offsets = group_sizes.cumsum(0, dtype=torch.int32) - group_sizes
        return cls(group_sizes, row_offsets, sizes.cumsum(0, dtype=torch.int32) - sizes, sizes, padded_rows)

    def tile_groups(self) -> torch.Tensor:
        """int64 [padded_rows / 128]: the group each tile belongs to."""
        starts = torch.arange(0, self.padded_rows, TILE_ROWS, dtype=torch.int32, device=self.group_sizes.device)
        return torch.searchsorted(self.padded_offsets + self.padded_sizes, starts, right=True)

    def source_rows(self) -> torch.Tensor:
        """int32 [padded_rows]: the input row each padded row is made from, -1 for padding."""
        group = self.tile_groups().repeat_interleave(TILE_ROWS)
        padded_row = torch.arange(self.padded_rows, dtype=torch.int32, device=self.group_sizes.device)
        local = padded_row - self.padded_offsets[group]
        return torch.where(local < self.group_sizes[group], self.row_offsets[group] + local, -1)

    def run_offsets(self, k: int) -> torch.Tensor:
        """int64 [padded_rows / 128, k]: where in `q`, in runs of 128 codes, the codes of a tile and column lie."""
        group = self.tile_groups()
        first_tile = self.padded_offsets[group].to(torch.int64) // TILE_ROWS
        tiles = self.padded_sizes[group].to(torch.int64) // TILE_ROWS
        tile = torch.arange(group.shape[0], device=group.device) - first_tile
        column = torch.arange(k, device=group.device)
        return (first_tile * k + tile)[:, None] + tiles[:, None] * column
