# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Which rows of a grouped GEMM belong to which expert."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ds_fp4.formats.columns import TILE_ROWS, padded_sizes


class Groups(NamedTuple):
    """Rows of the local experts in a grouped GEMM, each expert's padded to 128.

    Attributes:
        m_indices: int32 [P], expert of each row, -1 on padding, on the GEMM's device.
        padded_offsets: int32 [E+1], first row of each expert and P, on the GEMM's device.
        sizes: padded rows of each expert, multiples of 128, host integers.
    """

    m_indices: torch.Tensor
    padded_offsets: torch.Tensor
    sizes: tuple[int, ...]

    @property
    def padded_rows(self) -> int:
        """P, rows of all experts with their padding."""
        return sum(self.sizes)

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device | str = "cpu") -> Groups:
        """Groups of experts with `counts` rows. Waits for a GPU: for tests and tools."""
        sizes = tuple(padded_sizes(counts))
        rows = [
            torch.full((size,), -1, dtype=torch.int32).index_fill_(0, torch.arange(count), expert)
            for expert, (count, size) in enumerate(zip(counts, sizes, strict=True))
        ]
        m_indices = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int32)
        offsets = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
        return cls(m_indices.to(device), offsets.to(device), sizes)

    def check(self, experts: int, device: torch.device) -> None:
        """Shapes, dtypes and devices; what the tensors hold is not read.

        Raises:
            ValueError: if they do not fit `experts` experts on `device` or each other.
        """
        if len(self.sizes) != experts:
            raise ValueError(f"groups.sizes must have an entry for each of {experts} experts, got {len(self.sizes)}")
        if any(size < 0 or size % TILE_ROWS for size in self.sizes):
            raise ValueError(f"groups.sizes must be multiples of {TILE_ROWS}, got {list(self.sizes)}")
        for name, t, length in (
            ("m_indices", self.m_indices, self.padded_rows),
            ("padded_offsets", self.padded_offsets, experts + 1),
        ):
            if t.dtype != torch.int32 or tuple(t.shape) != (length,) or t.device != device or not t.is_contiguous():
                raise ValueError(
                    f"groups.{name} must be contiguous int32 [{length}] on {device}, got {t.dtype} {list(t.shape)} "
                    f"with strides {tuple(t.stride())} on {t.device}"
                )
