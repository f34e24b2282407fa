# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Geometry of the FP8 column layout, the K-major operand of weight-gradient GEMMs.

Rows (tokens) come in groups, one per expert, of m_e rows each; in the output every group is padded to p_e = the next
multiple of 128. `q` is one-dimensional: for each group in turn a row-major block [K, p_e], so that one column's
tokens lie side by side. `scales` is [K, sum(p_e) / 128]: one scale per column per tile of 128 rows, tiles of all
groups in order.

In scale_layout "blocks" 128 columns share a scale, as cuBLAS reads one operand of two: for each group a row-major
block [ceil(K / 128), p_e / 128 rounded up to 4], in one dimension. Group e's begins behind as many such columns as
there are tiles before it, rounded up to 4, and 4e more: far enough, and known from its number and its first tile. What
lies between and beside scales holds anything.
"""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import torch

from .blocks import FP8_GROUP

TILE_ROWS = FP8_GROUP
# What cuBLAS rounds the row stride of 128 x 128 scales up to, in values.
BLOCK_SCALE_ALIGNMENT = 4
# A number of them, or numbers.
Tiles = TypeVar("Tiles", int, torch.Tensor)


def padded_sizes(group_sizes: Iterable[int]) -> list[int]:
    """Each group's size rounded up to a multiple of 128; an empty group stays empty."""
    return [-(-size // TILE_ROWS) * TILE_ROWS for size in group_sizes]


def padded(group_sizes: torch.Tensor) -> torch.Tensor:
    """`padded_sizes` of an int32 tensor."""
    return (group_sizes + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS


def column_blocks(
    q: torch.Tensor, scales: torch.Tensor, group_sizes: Iterable[int], k: int | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the column layout, one (q [K, p_e], scales [K, p_e / 128]) a group.

    Args:
        q, scales: as conversions give them.
        group_sizes: host integers.
        k: the columns. Needed where the scales are in layout "blocks", whose views are [ceil(K / 128), p_e / 128].

    Raises:
        ValueError: if there are not as many codes, or scales in "blocks", as that makes.
    """
    sizes = padded_sizes(group_sizes)
    if scales.dim() == 2:
        k, tiles = scales.shape[0], scales.split([size // TILE_ROWS for size in sizes], dim=1)
    elif k is None:
        raise ValueError('scales in layout "blocks" do not tell the number of columns: give k')
    else:
        tiles = block_scales(scales, k, sizes)
    if q.numel() != k * sum(sizes):
        raise ValueError(f"q must have {k} columns of {sum(sizes)} rows, {k * sum(sizes)} codes, got {q.numel()}")
    codes = q.split([k * size for size in sizes])
    return [(part.view(k, size), of) for part, size, of in zip(codes, sizes, tiles, strict=True)]


def _align(tiles: Tiles) -> Tiles:
    return -(-tiles // BLOCK_SCALE_ALIGNMENT) * BLOCK_SCALE_ALIGNMENT


def block_scale_columns(first_tile: Tiles, group: Tiles) -> Tiles:
    """Columns of block scales, each of ceil(K / 128), before those of a group that begins with tile `first_tile`."""
    return _align(first_tile) + BLOCK_SCALE_ALIGNMENT * group


def block_scale_stride(tiles: Tiles) -> Tiles:
    """Values from row to row of the block scales of a group of `tiles` tiles."""
    return _align(tiles)


def block_scales_size(k: int, padded_rows: int, groups: int) -> int:
    """Values in all block scales of rows of K values."""
    return -(-k // FP8_GROUP) * block_scale_columns(padded_rows // TILE_ROWS, groups)


def block_scales(scales: torch.Tensor, k: int, group_sizes: Iterable[int]) -> list[torch.Tensor]:
    """Views [ceil(K / 128), p_e / 128] of the scales in layout "blocks", one a group. Sizes are host integers.

    Raises:
        ValueError: if the scales are not those of K columns and these groups.
    """
    blocks, first_tile, views = -(-k // FP8_GROUP), 0, []
    sizes = padded_sizes(group_sizes)
    wanted = block_scales_size(k, sum(sizes), len(sizes))
    if scales.shape != (wanted,):
        raise ValueError(f'scales in layout "blocks" must be [{wanted}] for {k} columns, got {list(scales.shape)}')
    for group, size in enumerate(sizes):
        tiles = size // TILE_ROWS
        stride = block_scale_stride(tiles)
        place = blocks * block_scale_columns(first_tile, group)
        views.append(scales[place : place + blocks * stride].view(blocks, stride)[:, :tiles])
        first_tile += tiles
    return views


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

    def _tiles(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """int64 [padded_rows / 128] each: of every tile its group, the group's first tile, how many the group has, and
        which of them it is."""
        group = self.tile_groups()
        first_tile = self.padded_offsets[group].to(torch.int64) // TILE_ROWS
        tiles = self.padded_sizes[group].to(torch.int64) // TILE_ROWS
        return group, first_tile, tiles, torch.arange(group.shape[0], device=group.device) - first_tile

    def run_offsets(self, k: int) -> torch.Tensor:
        """int64 [padded_rows / 128, k]: where in `q`, in runs of 128 codes, the codes of a tile and column lie."""
        _, first_tile, tiles, tile = self._tiles()
        column = torch.arange(k, device=tile.device)
        return (first_tile * k + tile)[:, None] + tiles[:, None] * column

    def block_scale_offsets(self, k: int) -> torch.Tensor:
        """int64 [padded_rows / 128, ceil(k / 128)]: where the scale of a tile and 128 columns lies in "blocks"."""
        group, first_tile, tiles, tile = self._tiles()
        blocks = -(-k // FP8_GROUP)
        block = torch.arange(blocks, device=tile.device)
        first = blocks * block_scale_columns(first_tile, group)
        return (first + tile)[:, None] + block_scale_stride(tiles)[:, None] * block
