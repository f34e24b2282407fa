# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Rows of one leg as byte records, and the GEMM operands that are read from them.

    | codes | scales | to 16 bytes | tail: routing, or the routing weights' gradients, to 16 bytes |

The front is the codec level's record (`ds_fp4.codec`). Received records are kept as they are: every GEMM operand is
read from them through the plan's order, and a row is never expanded in memory.
"""

from __future__ import annotations

import torch

from ds_fp4 import ops
from ds_fp4.codec import RECORD_ALIGNMENT, align_up, make_codec

Pair = tuple[torch.Tensor, torch.Tensor]


class RecordFormat:
    """Records of rows with `hidden` values in "mxfp4", "fp8" or "bf16".

    Args:
        name: the leg's codec. hidden: H. scale_rounding: of MXFP4.
        tail_bytes: bytes after the row.
    """

    def __init__(self, name: str, hidden: int, scale_rounding: str, tail_bytes: int = 0) -> None:
        self.name, self.hidden, self.scale_rounding = name, hidden, scale_rounding
        codec = make_codec(name, hidden, scale_rounding)
        self._codec = codec
        self._data_bytes = 2 * hidden if codec is None else codec.data_bytes
        self.front_bytes = align_up(self._data_bytes, RECORD_ALIGNMENT)
        self.tail_data_bytes = tail_bytes
        self.record_bytes = self.front_bytes + align_up(tail_bytes, RECORD_ALIGNMENT)

    # Padding is cleared where nobody else writes it, so that no old memory travels.

    def allocate(self, rows: int, device: torch.device) -> torch.Tensor:
        """New records uint8 [rows, bytes], padding cleared."""
        records = torch.empty(rows, self.record_bytes, dtype=torch.uint8, device=device)
        self._clear(records, self._data_bytes, self.front_bytes)
        self._clear(records, self.front_bytes + self.tail_data_bytes, self.record_bytes)
        return records

    def allocate_fronts(self, rows: int, device: torch.device) -> torch.Tensor:
        """New fronts of records uint8 [rows, bytes], padding cleared."""
        fronts = torch.empty(rows, self.front_bytes, dtype=torch.uint8, device=device)
        self._clear(fronts, self._data_bytes, self.front_bytes)
        return fronts

    def gather(self, fronts: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New records with these rows' fronts, int32 [n], zeros for -1; and their tails to fill."""
        records = torch.empty(rows.shape[0], self.record_bytes, dtype=torch.uint8, device=fronts.device)
        front, tail = records.split_with_sizes((self.front_bytes, self.record_bytes - self.front_bytes), 1)
        ops.gather_rows(fronts, rows, out=front)
        self._clear(tail, self.tail_data_bytes, self.record_bytes - self.front_bytes)
        return records, tail

    @staticmethod
    def _clear(records: torch.Tensor, start: int, end: int) -> None:
        if end > start:
            records[:, start:end].zero_()

    def tail(self, records: torch.Tensor) -> torch.Tensor:
        return records[:, self.front_bytes :]

    def rows(self, records: torch.Tensor) -> torch.Tensor | Pair:
        """The rows as the conversions take them: BF16 [n, H], (packed, scales) or (q, scales)."""
        if self._codec is None:
            return records[:, : self._data_bytes].view(torch.bfloat16)
        return self._codec.split(records)

    def encode(self, x: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        """Quantize BF16, FP16 or FP32 [n, H] into the fronts of `records`, and return them."""
        if self._codec is None:
            self.rows(records).copy_(x)
        elif self.name == "mxfp4":
            ops.bf16_to_fp4_row(x, self.scale_rounding, out=self.rows(records))
        else:
            ops.bf16_to_fp8_row(x, scale_dtype=torch.uint8, out=self.rows(records))
        return records

    def sum_into(self, rows: torch.Tensor, places: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        """Fill records with the sums of BF16 rows [P, H] that `places` int32 [n, k] lists."""
        ops.combine_rows(
            rows,
            None,
            places,
            out_format=self.name,
            scale_rounding=self.scale_rounding,
            out=self.rows(records),
        )
        return records

    def sums(self, records: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
        """BF16 [T, H]: for each token the sum of the records that `lists` int32 [T, k] names."""
        return ops.combine_rows(self.rows(records), None, lists, row_format=self.name)

    def values(self, records: torch.Tensor) -> torch.Tensor:
        """BF16 [n, H]: the rows decoded."""
        rows = self.rows(records)
        if self._codec is None:
            return rows
        return (ops.fp4_row_to_bf16 if self.name == "mxfp4" else ops.fp8_row_to_bf16)(*rows)

    def gemm_rows(self, records: torch.Tensor, order: torch.Tensor) -> Pair:
        """FP8 operand [P, H] of a grouped GEMM; row p is that of record order[p], zeros where it is -1."""
        rows = self.rows(records)
        if self._codec is None:
            return ops.bf16_to_fp8_row(rows, scale_layout="gemm", index=order)
        convert = ops.fp4_row_to_fp8_row if self.name == "mxfp4" else ops.fp8_row_to_fp8_row
        return convert(*rows, scale_layout="gemm", index=order)

    def gemm_columns(
        self, records: torch.Tensor, order: torch.Tensor, padded_sizes: torch.Tensor, scale_layout: str
    ) -> Pair:
        """FP8 operand of a weight gradient: per expert a block [H, p_e] of the same rows, K-major.

        Args:
            order: int32 [P] in expert order, each expert's rows padded to 128 with -1.
            padded_sizes: int32 [E], the padded rows of each.
            scale_layout: "gemm" or "blocks"; BF16 rows are quantized with a scale for each column.
        """
        rows, options = self.rows(records), {"padded_rows": order.shape[0], "index": order}
        if self._codec is None:
            return ops.bf16_to_fp8_row_and_col(rows, padded_sizes, scale_layout="gemm", **options)[1]
        convert = ops.fp4_row_to_fp8_col if self.name == "mxfp4" else ops.fp8_row_to_fp8_col
        return convert(*rows, padded_sizes, scale_layout=scale_layout, **options)
