# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""FP8 rows and FP8 columns of one tensor: a gradient is an operand of both the data- and the weight-gradient GEMM."""

import torch

from . import checks, rows, ue8m0
from .columns import TILE_ROWS, ColumnLayout
from .convert import source_rows, store_tile_scales, store_tiles
from .fp8 import bf16_to_fp8_row


@torch.no_grad()
def bf16_to_fp8_row_and_col(
    x: torch.Tensor,
    group_sizes: torch.Tensor,
    *,
    padded_rows: int | None = None,
    scale_layout: str = "row",
    index: torch.Tensor | None = None,
    out: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Quantize rows to FP8 rows and to the FP8 column layout (see `columns`), reading them once.

    Rows are those of `bf16_to_fp8_row`. Columns follow the same rule over the 128 rows of a tile instead of 128 values
    of a row, from the input's values, so that nothing is rounded twice: a column with a value that is not finite gets
    NaN codes in that tile, also for padding rows, a column of zeros exponent -127.

    Args:
        x: BF16, FP16 or FP32 [M, K], inner stride 1, any row stride.
        group_sizes: int32 [E], rows of each group, zero included; they add up to the rows (M, or R with an index).
            On a GPU that is not checked.
        padded_rows: the sum of the group sizes rounded up to 128 each. If None, a GPU is waited for to learn it.
        scale_layout: "row", or "gemm" for scales with strides (1, R or K rounded up to 4) and no exponent under -126.
        index: int32 [R], row r is made from x[index[r]]; -1 makes a zero row. None: all rows in order.
        out: ((q, scales), (q, scales)) to write to and return, q as float8_e4m3fn or uint8.

    Returns:
        Rows: q float8_e4m3fn [R, K], scales float32 [R, ceil(K/128)].
        Columns: q float8_e4m3fn [K * padded_rows], scales float32 [K, padded_rows / 128].

    Raises:
        ValueError: on a wrong shape, dtype, device, stride or index, or (host tensors) sizes that do not add up.
    """
    padded_rows, row_out, column_out = checks.prepare_bf16_to_fp8_row_and_col(
        x, group_sizes, padded_rows, scale_layout, index, out
    )
    layout = ColumnLayout.of(group_sizes, padded_rows)
    bf16_to_fp8_row(x, scale_layout=scale_layout, index=index, out=row_out)
    q, scales = column_out[0].view(torch.uint8), column_out[1]
    k = x.shape[1]
    source, runs = source_rows(layout, index), layout.run_offsets(k)
    for piece in rows.pieces(layout.padded_rows, k, q.device, multiple=TILE_ROWS):
        values = rows.take(x, source, piece).view(-1, TILE_ROWS, k).transpose(1, 2)
        tiles = slice(piece.start // TILE_ROWS, piece.stop // TILE_ROWS)
        codes, column_scales = bf16_to_fp8_row(values.reshape(-1, TILE_ROWS).contiguous(), scale_layout=scale_layout)
        exponents = ue8m0.exponents(column_scales).view(-1, k)
        codes = codes.view(torch.uint8).view(-1, k, TILE_ROWS).transpose(1, 2).reshape(-1, k)
        store_tiles(codes, runs[tiles], q)
        store_tile_scales(exponents, 1, scales[:, tiles])
    return row_out, column_out
